"""What `hpctrain check` and the start of a run look at: the job against its plugins, its ranks and its model."""
