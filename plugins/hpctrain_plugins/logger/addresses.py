"""Addresses of services, as the job file has them. Everybody who reads the run's directory sees the job file."""

from __future__ import annotations

from urllib.parse import urlsplit

from hpctrain.api import Problem


def address_problems(option: str, address: str, instead: str) -> list[Problem]:
    """The problems of a service's address. instead: where a name or password belongs."""
    if "@" in address:
        why = f"{option} holds a name or password, which would be written into the run's files; use {instead}"
        return [Problem(why)]
    try:
        found = urlsplit(address)
        is_one = found.scheme in ("http", "https") and bool(found.hostname) and found.port != 0
    except ValueError:  # the port is no number
        is_one = False
    return [] if is_one else [Problem(f'{option}: found {address!r}, expected an address such as "http://host:port"')]
