"""Starts ranks: `hpctrain run -n N` on this machine and on the hosts of a file, `hpctrain submit` on a scheduler's nodes."""
