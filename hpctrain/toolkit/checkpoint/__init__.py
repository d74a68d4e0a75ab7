"""What a checkpoint format is made of."""
