"""The protocol of the guarded store: a handshake, then messages.

    server -> client   greeting: magic | server nonce | length of introduction | introduction
    client -> server   proof: client nonce | HMAC(secret, "client", both nonces, introduction, server's address)
    server -> client   proof: HMAC(secret, "server", both nonces, introduction, server's address)
    both               message: length | payload

Each end takes the server's address from its own socket, so a stranger who listens elsewhere cannot relay the proofs. The
hash is SHA-256. Nothing is encrypted, and messages carry no proof: who can change packets on their way can change the
ranks' data anyway.
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
LENGTH = struct.Struct(">I")
OK, LATE, WRONG = b"ok", b"late", b"wrong"  # the begins of replies
NUMBER = struct.Struct(">q")
SECONDS = struct.Struct(">d")


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
    return b"".join(piece for part in parts for piece in (LENGTH.pack(len(part)), part))


def unpack(payload: bytes) -> list[bytes]:
    """The byte strings of a payload."""
    parts, end = [], 0
    while end < len(payload):
        (length,) = LENGTH.unpack_from(payload, end)
        begin, end = end + LENGTH.size, end + LENGTH.size + length
        parts.append(payload[begin:end])
    return parts


def frame(parts: Sequence[bytes]) -> bytes:
    """The message of several byte strings: the bytes to send."""
    payload = pack(parts)
    return LENGTH.pack(len(payload)) + payload


def endpoint(address: tuple[Any, ...]) -> bytes:
    """The host and the port of a socket's address, as both ends see them."""
    return f"{str(address[0]).partition('%')[0]} {address[1]}".encode()
