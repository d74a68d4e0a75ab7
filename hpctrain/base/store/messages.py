"""The protocol of the guarded store: a handshake, then numbered and authenticated messages.

    server -> client   greeting: magic | server nonce | length of introduction | introduction
    client -> server   proof: client nonce | HMAC(secret, "client", both nonces, introduction, server's address)
    server -> client   proof: HMAC(secret, "server", both nonces, introduction, server's address)
    both               message: length | number | HMAC(key, number, payload) | payload

Each end takes the server's address from its own socket, so a stranger who listens elsewhere cannot relay the proofs. Each
direction has its own key, HMAC(secret, direction, both nonces), and numbers its messages from 0. An altered, repeated,
reflected or reordered message is therefore an error. Nothing is encrypted. The hash is SHA-256.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Sequence
from typing import Any

__all__ = ["DIGEST_BYTES", "SECRET_BYTES", "ProtocolError", "digest", "verify"]

MAGIC = b"hpctrain store 1\n"
NONCE_BYTES = 32
DIGEST_BYTES = 32
SECRET_BYTES = 32
GREETING_HEADER = struct.Struct(f">{len(MAGIC)}s{NONCE_BYTES}sH")
MESSAGE_HEADER = struct.Struct(f">IQ{DIGEST_BYTES}s")
OK, LATE, WRONG = b"ok", b"late", b"wrong"  # the begins of replies
NUMBER = struct.Struct(">q")
SECONDS = struct.Struct(">d")
MAX_PAYLOAD = 2**28  # bytes; peers have proved who they are, so this only catches mistakes
_LENGTH = struct.Struct(">I")


class ProtocolError(Exception):
    """The other end is no rank of this job, or somebody altered what it sent."""


def digest(secret: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA-256 of length-prefixed parts, so that different sequences of parts have different inputs."""
    return hmac.digest(secret, pack(parts), "sha256")


def verify(found: bytes, secret: bytes, *parts: bytes) -> bool:
    """Whether `found` is the digest of `parts`, in constant time."""
    return hmac.compare_digest(found, digest(secret, *parts))


def pack(parts: Sequence[bytes]) -> bytes:
    """Pack several byte strings into a payload."""
    return b"".join(piece for part in parts for piece in (_LENGTH.pack(len(part)), part))


def unpack(payload: bytes) -> list[bytes]:
    """The byte strings of a payload; ProtocolError when they do not fill it exactly."""
    parts, position = [], 0
    while position < len(payload):
        if position + _LENGTH.size > len(payload):
            raise ProtocolError("a message ends in the middle of a length")
        (length,) = _LENGTH.unpack_from(payload, position)
        position += _LENGTH.size
        if position + length > len(payload):
            raise ProtocolError("a message ends in the middle of a part")
        parts.append(payload[position : position + length])
        position += length
    return parts


class Sealer:
    """Numbers and authenticates the messages of one direction."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def seal(self, parts: Sequence[bytes]) -> bytes:
        """The bytes to send."""
        payload = pack(parts)
        if len(payload) > MAX_PAYLOAD:
            raise ProtocolError(f"a message of {len(payload)} bytes is longer than the {MAX_PAYLOAD} allowed")
        tag = digest(self._key, self._number.to_bytes(8, "big"), payload)
        header = MESSAGE_HEADER.pack(len(payload), self._number, tag)
        self._number += 1
        return header + payload


class Opener:
    """Checks the messages of one direction."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._expected = 0
        self._tag = b""

    def length(self, header: bytes) -> int:
        """The size in bytes of the payload that follows `header`; ProtocolError for a message out of order."""
        length, number, self._tag = MESSAGE_HEADER.unpack(header)
        if number != self._expected:
            raise ProtocolError(
                f"found message {number}, expected {self._expected}: it was repeated or comes out of order"
            )
        if length > MAX_PAYLOAD:
            raise ProtocolError(f"a message of {length} bytes is longer than the {MAX_PAYLOAD} allowed")
        return int(length)

    def open(self, payload: bytes) -> list[bytes]:
        """The parts of the payload; ProtocolError if it was altered."""
        if not verify(self._tag, self._key, self._expected.to_bytes(8, "big"), payload):
            raise ProtocolError("a message was altered on its way")
        self._expected += 1
        return unpack(payload)


def endpoint(address: tuple[Any, ...]) -> bytes:
    """The host and the port of a socket's address, as both ends see them."""
    return f"{str(address[0]).partition('%')[0]} {address[1]}".encode()


def direction_key(secret: bytes, direction: bytes, nonces: bytes) -> bytes:
    """The key of one direction (b"to server" or b"to client") of one connection."""
    return digest(secret, b"key", direction, nonces)
