"""`hpctrain run -n N` alone: starts the ranks on this machine, and stays with them until the last has left."""
