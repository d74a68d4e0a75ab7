"""Lists, selects, saves and restores checkpoints, and reads weights from other programs. The formats are plugins."""
