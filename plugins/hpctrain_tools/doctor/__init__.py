"""Checks of the machine before a job is trained on it: `hpctrain doctor`."""
