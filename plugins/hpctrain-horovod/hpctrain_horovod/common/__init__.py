"""The parts of Horovod that belong to no framework, under their usual names."""
