"""What a pickle asks the unpickler to make room for, looked at before anything is made.

The unpickler believes every number: a few bytes can ask for a memo of 2^32 places, or a text of 2^60 bytes.
"""

from __future__ import annotations

import pickle
import pickletools
import re

from hpctrain.api import CheckpointError

_OPCODES = [(one.code.encode("latin-1"), one.arg.n if one.arg else 0) for one in pickletools.opcodes]
_LONG_PUT = pickle.LONG_BINPUT
_LINES = {code[0]: 2 if code in (pickle.GLOBAL, pickle.INST) else 1 for code, size in _OPCODES if size == -1}
"""Operations that are followed by text, to the ends of so many lines."""
_COUNTED = {code[0]: {-2: 1, -3: 4, -4: 4, -5: 8}[size] for code, size in _OPCODES if size < -1}
"""Operations that are followed by a number of so many bytes, and then by as many bytes as the number says."""
_HARMLESS = re.compile(
    b"(?:%s){1,1000}"
    % b"|".join(
        re.escape(code) + b".{%d}" % size
        for code, size in _OPCODES
        if size >= 0 and code not in (_LONG_PUT, pickle.STOP)
    ),
    re.DOTALL,
)
"""Operations that ask for nothing: nearly all of a table, so they are passed many in one go."""


def check_sizes(raw: bytes) -> None:
    """CheckpointError for a pickle that asks for more memory than its own length can fill."""
    at = 0
    try:
        while (code := raw[at := _passed(raw, at)]) != pickle.STOP[0]:
            begin = at = at + 1
            if code in _COUNTED:
                at += _COUNTED[code]
                asked = int.from_bytes(raw[begin:at], "little")
                at += asked
            elif code == _LONG_PUT[0]:
                at += 4
                asked = int.from_bytes(raw[begin:at], "little")
            else:
                for _ in range(_LINES[code]):
                    at = raw.index(b"\n", at) + 1
                asked = int(raw[begin:at]) if code == pickle.PUT[0] else 0
            if asked > len(raw):
                raise CheckpointError(
                    f"it asks for room for {asked} things or bytes at byte {begin}, and has {len(raw)} bytes"
                )
    except (IndexError, KeyError, ValueError) as error:
        raise CheckpointError(f"malformed content: it is no whole pickle: {error}") from error


def _passed(raw: bytes, at: int) -> int:
    """Where the harmless operations from byte `at` on end."""
    while found := _HARMLESS.match(raw, at):
        at = found.end()
    return at
