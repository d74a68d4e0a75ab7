"""A trained model at work: `hpctrain evaluate`, `predict` and `sample`."""
