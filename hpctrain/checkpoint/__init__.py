"""Which checkpoints there are, which one is taken, and weights from elsewhere. The formats are plugins."""
