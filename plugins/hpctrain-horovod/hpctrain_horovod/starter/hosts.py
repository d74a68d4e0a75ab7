"""The hosts that a user of horovodrun names, or a program of theirs."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from hpctrain.starting.hosts import Hosts, read_hostfile
from hpctrain.toolkit.commands import UsageError

_PATIENCE = 10.0  # seconds for a host discovery script


def read_hosts(text: str | None, file: Path | None) -> Hosts | None:
    """The hosts of `host:slots,...` or of a hostfile; None without either. Raises UsageError with the part that cannot be read."""
    if text is not None:
        return Hosts(tuple(_host(part, "hosts") for part in text.split(",")))
    return None if file is None else read_hostfile(file)


def discovered(script: Path, slots: int) -> Hosts:
    """The hosts that a program prints, a line `HOST` or `HOST:SLOTS` each. Raises UsageError if it fails or prints others."""
    where = f"--host-discovery-script {script}"
    try:
        done = subprocess.run([script.absolute()], stdout=subprocess.PIPE, text=True, timeout=_PATIENCE)
    except (OSError, UnicodeDecodeError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{where} failed: {error}") from None
    if done.returncode:
        raise UsageError(
            f"{where} ended with exit code {done.returncode}, expected 0 and a line HOST:SLOTS for each host"
        )
    lines = [line if ":" in line else f"{line}:{slots}" for line in done.stdout.splitlines() if line.strip()]
    return Hosts(tuple(_host(line, where) for line in lines))


def _host(part: str, where: str) -> tuple[str, int]:
    found = re.fullmatch(r"([\w.-]+)(?::(\d+))?", part.strip())
    slots = 1 if found is None or found[2] is None else int(found[2])
    if found is None or slots == 0:
        raise UsageError(f"{where}: found {part!r}, expected HOST:SLOTS")
    return found[1], slots
