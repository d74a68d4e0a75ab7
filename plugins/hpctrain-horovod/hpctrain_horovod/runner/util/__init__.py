"""Helpers that scripts import from `horovod.runner.util`."""
