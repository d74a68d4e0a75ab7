"""Learning-rate schedule plugins."""
