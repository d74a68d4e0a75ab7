"""`hpctrain run -n N` without a launcher: starts the ranks on this machine and waits until all have exited."""
