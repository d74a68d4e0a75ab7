"""Schedulers that `hpctrain submit` sends jobs to."""
