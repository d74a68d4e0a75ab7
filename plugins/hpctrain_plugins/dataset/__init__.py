"""Dataset plugins."""
