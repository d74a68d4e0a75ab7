"""Tools around the trainer, behind the same hooks as those of other packages: each command here is a plugin's."""
