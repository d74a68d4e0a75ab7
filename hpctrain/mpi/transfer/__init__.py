"""Moves bytes through a communicator's messages and a node's memory, and waits for both under a time limit."""
