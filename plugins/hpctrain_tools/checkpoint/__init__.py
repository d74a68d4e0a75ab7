"""Lists, shows, verifies and compares checkpoints, and exports and imports weights: `hpctrain checkpoint`."""
