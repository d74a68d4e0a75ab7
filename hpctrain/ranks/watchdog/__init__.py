"""Finds out which rank a job waits for: heartbeats over the store, the status of all ranks, an end instead of a hang."""
