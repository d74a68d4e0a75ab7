"""The contracts between the trainer and plugins: one file per slot. Plugin authors import them from `hpctrain.api`."""
