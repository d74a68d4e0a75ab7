"""Times as a job file has them: "45m", "1h30m", "2d", or as Slurm writes them: minutes ("90"), "10:00" (minutes and seconds),
"12:00:00", "1-12", "1-12:30", "1-12:00:00"."""

from __future__ import annotations

import re

_FORMS = (
    r"(?:(?P<d>\d+)d)?(?:(?P<h>\d+)h)?(?:(?P<m>\d+)m)?(?:(?P<s>\d+)s)?",
    r"(?P<m>\d+)(?::(?P<s>[0-5]\d))?",
    r"(?P<h>\d+):(?P<m>[0-5]\d):(?P<s>[0-5]\d)",
    r"(?P<d>\d+)-(?P<h>\d+)(?::(?P<m>[0-5]\d)(?::(?P<s>[0-5]\d))?)?",
)
_IN_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def seconds_of(time: str) -> int:
    """ "90m" -> 5400, "1-00:00:00" -> 86400, "10" -> 600. Raises ValueError."""
    found = next((match for form in _FORMS if (match := re.fullmatch(form, time))), None) if time else None
    seconds = 0 if found is None else sum(int(n or 0) * _IN_SECONDS[unit] for unit, n in found.groupdict().items())
    if not 0 < seconds < 2**31:
        raise ValueError('expected a time such as "24h", "1h30m", "90m", or as in Slurm "90" (minutes) or "1-12:00:00"')
    return seconds


def seconds_or_number(value: object) -> object:
    """A text in seconds; anything else as it is."""
    return seconds_of(value) if isinstance(value, str) else value
