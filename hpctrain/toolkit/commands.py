"""Parts of a command of a plugin: the marker of its hook, errors that become a sentence and an exit code, its help.

Imports no torch, since the help imports every command.
"""

from hpctrain.base.child_python import python_code, python_module
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
from hpctrain.base.safe_files import (
    closed_directory,
    is_only_ours,
    is_own_directory,
    own_directory,
    read_bytes,
    reading,
    replacing,
    scratch_directory,
    temporary_place,
)
from hpctrain.cli.groups import OpenGroup
from hpctrain.cli.options import example, say, set_option
from hpctrain.plugins.hookspecs import hookimpl

__all__ = [
    "EXIT_CANCELLED",
    "EXIT_DONE",
    "EXIT_STOPPED",
    "EXIT_TRAINING",
    "EXIT_USAGE",
    "EnvironmentUnfitError",
    "OpenGroup",
    "UsageError",
    "closed_directory",
    "escaped",
    "example",
    "hookimpl",
    "is_only_ours",
    "is_own_directory",
    "own_directory",
    "python_code",
    "python_module",
    "read_bytes",
    "reading",
    "reason",
    "replacing",
    "say",
    "scratch_directory",
    "set_option",
    "temporary_place",
]
