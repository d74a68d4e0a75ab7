"""The secret of ranks without MPI: through MUNGE if the nodes run it, else in a file that only its user can read.

MUNGE (https://dun.github.io/munge) is the authentication service of most Slurm clusters. Rank 0 seals the secret in a
credential that only processes of the same user can open, and sends the credential to everybody who connects.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from hpctrain.base.errors import EnvironmentUnfitError
from hpctrain.base.safe_files import is_closed, own_directory, read_all, reading, replacing
from hpctrain.base.store.messages import SECRET_BYTES

_MUNGE_SECONDS = 10
# unmunge's status for a credential opened before, for instance by another rank of the node. Replays are harmless: in the
# handshake that follows, the server proves that it knows the secret now.
_REPLAYED = 17
_FILE_BYTES = 2 * SECRET_BYTES


class Credential(NamedTuple):
    """Rank 0's side: the secret, the introduction sent to everybody who connects, and the removal of the secret's file."""

    secret: bytes
    introduction: bytes
    remove: Callable[[], None]


def secret_file(token: str) -> Path:
    """The file with the secret of the start named `token`, in the home directory, which the nodes of a cluster share."""
    return Path.home() / ".hpctrain" / f"secret-{sha256(token.encode()).hexdigest()[:32]}"


def make_credential(token: str, file: Path | None) -> Credential:
    """A secret for the start named `token`. If `file` is given, it is the only carrier; a starter may have put one there.

    Raises EnvironmentUnfitError when neither MUNGE nor a file can carry it.
    """
    if file is not None and (given := _read(file)) is not None:
        return Credential(given, b"", partial(file.unlink, missing_ok=True))
    secret = secrets.token_bytes(SECRET_BYTES)
    if file is None:
        if (sealed := _seal(secret, token)) is not None:
            return Credential(secret, sealed, lambda: None)
        file = secret_file(token)
    try:
        own_directory(file.parent)
        with replacing(file, 0o600) as opened:
            opened.write(secret.hex().encode())
    except OSError as error:
        raise EnvironmentUnfitError(
            f"the ranks have no way to recognize each other: this node runs no MUNGE, and {file} cannot be written "
            f"({error.strerror or error}); expected one of the two: start MUNGE, or set HOME to a directory that the nodes share"
        ) from error
    return Credential(secret, b"", partial(file.unlink, missing_ok=True))


def find_secret(token: str, file: Path | None, introduction: bytes) -> bytes | None:
    """The other ranks' side: the secret behind rank 0's introduction; None if there is none or it is another user's.

    To be asked at each attempt: the file may still be an earlier start's.
    """
    return _open_seal(introduction, token) if introduction else _read(file or secret_file(token))


def _read(path: Path) -> bytes | None:
    """The secret in a file that belongs to this user and that nobody else can access; else None."""
    with contextlib.suppress(OSError), reading(path) as fd:
        if is_closed(os.fstat(fd)):
            return _from_hex(read_all(fd, path, _FILE_BYTES))
    return None


def _seal(secret: bytes, token: str) -> bytes | None:
    """A MUNGE credential for this user; None where MUNGE does not run."""
    if shutil.which("munge") is None or shutil.which("unmunge") is None:
        return None
    content = f"{token}\n{secret.hex()}"
    done = _munge(["munge", f"--restrict-uid={os.geteuid()}", "--ttl=-1"], content.encode())
    return done.stdout.strip() if done is not None and done.returncode == 0 else None


def _open_seal(credential: bytes, token: str) -> bytes | None:
    done = _munge(["unmunge", "--metadata=/dev/stderr"], credential)
    if done is None or done.returncode not in (0, _REPLAYED):
        return None
    sealed_by = re.search(rb"^UID:.*\((\d+)\)\s*$", done.stderr, re.MULTILINE)
    if sealed_by is None or int(sealed_by[1]) != os.geteuid():
        return None
    found, _, secret = done.stdout.rpartition(b"\n")
    return _from_hex(secret) if found == token.encode() else None


def _munge(command: list[str], content: bytes) -> subprocess.CompletedProcess[bytes] | None:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(command, input=content, capture_output=True, timeout=_MUNGE_SECONDS)
    return None


def _from_hex(text: bytes) -> bytes | None:
    return bytes.fromhex(text.decode()) if re.fullmatch(rb"[0-9a-f]{%d}" % _FILE_BYTES, text) else None
