"""The program `horovodrun`, as a function."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def run_commandline() -> NoReturn:
    """Become `horovodrun` with this process's arguments."""
    os.execv(sys.executable, [sys.executable, "-m", "hpctrain", "horovodrun", *sys.argv[1:]])
