"""Commands that run Python in a child process. `-m` and `-c` alone would put the current directory, in which others may have put
files, before what is installed. Imports nothing from hpctrain.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from multiprocessing import util

__all__ = ["python_code", "python_module"]

# A statement that does what `-P` does, which Python has from 3.11 on
_AWAY = "import sys; sys.path[:1] = filter(None, sys.path[:1]); "
_AS_MODULE = f"{_AWAY}del sys.argv[0]; import runpy; runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
# A program of a child of `multiprocessing`, whose own follows behind another -c
_THEN = f"{_AWAY}code = sys.argv[2]; del sys.argv[1:3]; exec(code)"


def guard_multiprocessing() -> None:
    """Let `multiprocessing` start its children so, too: they import it before they have their parent's path. They listen in a
    closed directory: Python before 3.10.9 and 3.11.1 let any user into a fork server (CVE-2022-42919)."""
    away = ["-P"] if sys.version_info >= (3, 11) else ["-c", _THEN]
    flags = vars(subprocess)["_args_from_interpreter_flags"]
    vars(util).update(abstract_sockets_supported=False, _args_from_interpreter_flags=lambda: [*flags(), *away])


def python_module(module: str, *words: str, python: str = sys.executable) -> list[str]:
    """The command that runs a module. python: an interpreter, which may be of another version."""
    if sys.version_info >= (3, 11) and python == sys.executable:
        return [python, "-P", "-m", module, *words]
    return [python, "-c", _AS_MODULE, module, *words]


def words_behind(command: Sequence[str]) -> Sequence[str]:
    """The words of a command of `python_module` that its module gets."""
    return command[4:]


def python_code(code: str, *words: str) -> list[str]:
    """The command that runs a program given as text."""
    return [sys.executable, "-c", _AWAY + code, *words]
