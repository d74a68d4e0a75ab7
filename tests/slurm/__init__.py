"""Jobs on a real Slurm of two nodes. A package, so that its conftest does not take the name of the one at the root."""
