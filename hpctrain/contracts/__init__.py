"""What each plugin slot asks of a plugin: one file per slot. Plugin authors import them from `hpctrain.api`."""
