"""Times as a job file has them: "45m", "1h30m", "2d", or as Slurm writes them, "1-12:00:00"."""

from __future__ import annotations

import re

_CLOCK = r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)"
_UNITS = r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?"
_IN_SECONDS = (86400, 3600, 60, 1)


def seconds_of(time: str) -> int:
    """ "90m" -> 5400, "1-00:00:00" -> 86400. Raises ValueError."""
    found = re.fullmatch(_CLOCK, time) or (re.fullmatch(_UNITS, time) if time else None)
    seconds = (
        0 if found is None else sum(int(n or 0) * unit for n, unit in zip(found.groups(), _IN_SECONDS, strict=True))
    )
    if not 0 < seconds < 2**31:
        raise ValueError('expected a time such as "24h", "1h30m", "90m" or "1-12:00:00"')
    return seconds


def seconds_or_number(value: object) -> object:
    """A text in seconds; anything else as it is."""
    return seconds_of(value) if isinstance(value, str) else value
