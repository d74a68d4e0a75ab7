"""The one place that states the version; imports nothing, so that packaging can read it."""

__version__ = "0.1.0"
API_VERSION = 2
"""The version of the interface for plugins. A release that adds to it or changes it raises it."""
