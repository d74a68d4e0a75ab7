"""Shared code of the formats of this folder."""
