"""Parts of a command of a plugin: the marker of its hook, errors that become a sentence and an exit code, its help.

Imports no torch, since the help imports every command.
"""

from hpctrain.base.errors import (
    EXIT_CANCELLED,
    EXIT_DONE,
    EXIT_STOPPED,
    EXIT_TRAINING,
    EXIT_USAGE,
    EnvironmentUnfitError,
    UsageError,
    escaped,
    reason,
)
from hpctrain.cli.groups import OpenGroup
from hpctrain.cli.options import example, say, set_option
from hpctrain.registry.hookspecs import hookimpl

__all__ = [
    "EXIT_CANCELLED", "EXIT_DONE", "EXIT_STOPPED", "EXIT_TRAINING", "EXIT_USAGE", "EnvironmentUnfitError", "OpenGroup",
    "UsageError", "escaped", "example", "hookimpl", "reason", "say", "set_option",
]  # fmt: skip
