"""`check_plugin`, the kit for authors of plugins: docs/plugins/testing.md. It is a tool, which the first call imports."""

from hpctrain_tools.testing.check import BrokenPromiseError, check_plugin

__all__ = ["BrokenPromiseError", "check_plugin"]
