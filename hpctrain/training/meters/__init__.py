"""The meters of a training run: where a step's time goes, the slow rank, operations, memory, traffic."""
