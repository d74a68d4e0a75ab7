"""The plugins that come with hpctrain: one folder per slot, one file or folder per plugin."""
