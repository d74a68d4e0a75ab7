"""Precision plugins."""
