"""Starts the ranks of Horovod scripts, over MPI or without; replaces lost workers of elastic jobs."""
