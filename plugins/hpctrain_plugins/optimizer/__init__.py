"""Optimizer plugins."""
