"""Plugins of the slot `checkpoint`."""
