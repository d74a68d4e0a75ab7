"""System packages that some tests need: these are skipped without them, and the last line of a run says what was not tested."""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable

import pytest

_DEBIAN = {
    "cc": "gcc", "chromedriver": "chromium-driver", "h5dump": "hdf5-tools", "ip": "iproute2", "munged": "munge",
    "slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "srun": "slurm-wlm",
}  # fmt: skip
"""Debian's package of a command, where it has another name."""


def need_commands(*commands: str) -> None:
    """Skip the test unless all `commands` are installed; on CI, which installs them, fail it."""
    missing = dict.fromkeys(_DEBIAN.get(name, name) for name in commands if shutil.which(name) is None)
    if missing:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(f"needs {', '.join(missing)}")


def untested(reasons: Iterable[str]) -> str | None:
    """Name the packages for want of which tests were skipped, and the number of these. reasons: of all skipped tests."""
    packages = Counter(
        match[1] for reason in reasons if (match := re.fullmatch(r"Skipped: needs (\S+(?:, \S+)*)", reason))
    )
    if not packages:
        return None
    counts = "; ".join(f"{names} ({number})" for names, number in packages.most_common())
    return f"skipped for want of packages (number of tests): {counts}"
