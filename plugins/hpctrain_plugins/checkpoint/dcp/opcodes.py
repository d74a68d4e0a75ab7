"""What a pickle asks the unpickler to make room for, looked at before anything is made.

The unpickler believes every number: a few bytes can ask for a memo of 2^32 places, or a text of 2^60 bytes.
"""

from __future__ import annotations

import pickle
import pickletools

from hpctrain.api import CheckpointError

_LINES = {
    ord(one.code): 2 if one.name in ("GLOBAL", "INST") else 1
    for one in pickletools.opcodes
    if one.arg and one.arg.n == -1
}
"""Opcodes that are followed by text, to the ends of so many lines."""
_COUNTED = {
    ord(one.code): {-2: 1, -3: 4, -4: 4, -5: 8}[one.arg.n] for one in pickletools.opcodes if one.arg and one.arg.n < -1
}
"""Opcodes that are followed by a number of so many bytes, and then by as many bytes as the number says."""
_FIXED = {
    ord(one.code): one.arg.n if one.arg else 0 for one in pickletools.opcodes if one.arg is None or one.arg.n >= 0
}
"""All others, with the bytes that follow."""
_PUT, _LONG_PUT, _STOP = pickle.PUT[0], pickle.LONG_BINPUT[0], pickle.STOP[0]


def check_sizes(raw: bytes) -> None:
    """CheckpointError for a pickle that asks for more memory than its own length can fill."""
    at = 0
    try:
        while (code := raw[at]) != _STOP:
            begin = at = at + 1
            if code in _FIXED:
                at += _FIXED[code]
                asked = int.from_bytes(raw[begin:at], "little") if code == _LONG_PUT else 0
            elif code in _COUNTED:
                at += _COUNTED[code]
                asked = int.from_bytes(raw[begin:at], "little")
                at += asked
            else:
                for _ in range(_LINES[code]):
                    at = raw.index(b"\n", at) + 1
                asked = int(raw[begin:at]) if code == _PUT else 0
            if asked > len(raw):
                raise CheckpointError(
                    f"it asks for room for {asked} things or bytes at byte {begin}, and has {len(raw)} bytes"
                )
    except (IndexError, KeyError, ValueError) as error:
        raise CheckpointError(f"malformed content: it is no whole pickle: {error}") from error
