"""Logger plugins."""
