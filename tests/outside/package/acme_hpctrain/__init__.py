"""Plugins for hpctrain."""
