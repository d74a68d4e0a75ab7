"""Gradient compression plugins."""
