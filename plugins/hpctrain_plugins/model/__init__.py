"""Model plugins."""
