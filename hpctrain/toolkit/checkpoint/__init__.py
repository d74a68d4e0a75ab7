"""The parts of a checkpoint format."""
