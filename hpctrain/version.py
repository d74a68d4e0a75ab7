"""The one place that states the version; imports nothing, so that packaging can read it."""

__version__ = "0.1.0"
