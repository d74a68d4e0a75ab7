"""The program `horovodrun`, as a function."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from hpctrain.base.child_python import python_module


def run_commandline() -> NoReturn:
    """Become `horovodrun` with this process's arguments."""
    os.execv(sys.executable, python_module("hpctrain", "horovodrun", *sys.argv[1:]))
