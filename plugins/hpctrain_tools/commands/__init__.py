"""Commands of plugins."""
