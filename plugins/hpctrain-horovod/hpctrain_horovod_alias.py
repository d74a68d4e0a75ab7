"""Finds `horovod` where Python finds no other: as hpctrain_horovod.

Python imports this module at every start, through a .pth file. So it imports nothing else before a program asks for Horovod.
"""

from __future__ import annotations

import sys


class LateFinder:
    """The last finder: a real Horovod is found before it is asked."""

    @staticmethod
    def find_spec(fullname: str, path: object = None, target: object = None) -> object:
        """The module of `horovod`; None for every other name."""
        if fullname != "horovod":
            return None
        from hpctrain_horovod.alias import Finder, install

        install()  # in front, for the modules below it: Python would load them a second time, under the other name
        return Finder().find_spec(fullname, None)


if not any(finder is LateFinder for finder in sys.meta_path):
    sys.meta_path.append(LateFinder)  # type: ignore[arg-type]
