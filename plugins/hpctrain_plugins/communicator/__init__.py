"""Communicator plugins."""
