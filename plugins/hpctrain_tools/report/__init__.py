"""The report of a run: `hpctrain report`, and the hook that writes it at the end of a run."""
