"""The installed plugins: slots, discovery, conflicts."""
