"""Checks a job against its plugins, its ranks and its model, for `hpctrain check` and the start of a run."""
