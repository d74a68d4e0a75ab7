"""Hooks that are tools."""
