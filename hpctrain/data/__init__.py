"""Chooses the samples that a rank trains on, and loads them ahead of the step."""
