"""`horovod.run`: runs a Python function on several ranks, and returns what each returned."""

from __future__ import annotations

import hashlib
import importlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hpctrain.base.child_python import python_module
from hpctrain.base.safe_files import scratch_directory

FUNCTION, RESULT = "function", "result"
"""Files of a run's directory: the function with its arguments, and RESULT.N, what rank N returned."""


def run(
    func: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, num_proc: int = 1,
    min_num_proc: int | None = None, max_num_proc: int | None = None, slots: int | None = None,
    reset_limit: int | None = None, cooldown_range: Sequence[int] | None = None, hosts: str | None = None,
    hostfile: str | None = None, host_discovery_script: str | None = None, start_timeout: float | None = None,
    ssh_port: int | None = None, ssh_identity_file: str | None = None, disable_cache: bool | None = None,
    output_filename: str | None = None, verbose: bool | None = None, use_gloo: bool | None = None,
    use_mpi: bool | None = None, mpi_args: str | None = None, network_interface: str | None = None,
    executable: str | None = None, np: int | None = None, min_np: int | None = None, max_np: int | None = None,
) -> list[Any]:  # fmt: skip
    """Run `func(*args, **kwargs)` on `num_proc` ranks, as `horovodrun` would; returns the results in rank order.

    The function and the results travel as pickles; with cloudpickle installed, it may be defined anywhere. The ranks import from
    where this process does, unless `executable` gives them another Python. np, min_np, max_np: the older names of the three
    numbers. The other arguments are options of horovodrun. Raises RuntimeError if a rank fails, ValueError if the function cannot
    be pickled, and for arguments that exclude each other.
    """
    if hosts is not None and hostfile is not None:
        raise ValueError("found both hosts and hostfile, expected one")
    if use_gloo and use_mpi:
        raise ValueError("found both use_gloo and use_mpi, expected one")
    options: list[tuple[str, Any]] = [
        ("-np", np or num_proc), ("--min-np", min_np or min_num_proc), ("--max-np", max_np or max_num_proc), ("--slots", slots),
        ("--reset-limit", reset_limit), ("--hosts", hosts), ("--hostfile", hostfile),
        ("--host-discovery-script", host_discovery_script), ("--start-timeout", start_timeout), ("--mpi-args", mpi_args),
        ("--ssh-port", ssh_port), ("--ssh-identity-file", ssh_identity_file), ("--output-filename", output_filename),
        ("--network-interface", network_interface),
    ]  # fmt: skip
    words = [word for name, value in options if value is not None for word in (name, str(value))]
    words += ["--blacklist-cooldown-range", *map(str, cooldown_range)] if cooldown_range else []
    flags = {"--verbose": verbose, "--gloo": use_gloo, "--mpi": use_mpi, "--disable-cache": disable_cache}
    words += [name for name, on in flags.items() if on]
    environment = dict(os.environ)
    # the function's modules; another Python has a library of its own
    paths = (
        sys.path
        if executable in (None, sys.executable)
        else [sys.path[0], *environment.get("PYTHONPATH", "").split(os.pathsep)]
    )
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path or os.getcwd() for path in [*paths, ""]))
    with scratch_directory() as directory:
        content = _pickled((func, tuple(args), dict(kwargs or {})))
        (directory / FUNCTION).write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        task = python_module(
            "hpctrain_horovod.runner.task", str(directory), digest, python=executable or sys.executable
        )
        command = python_module("hpctrain", "horovodrun", *words, *task)
        done = subprocess.run(command, env=environment)
        if done.returncode:
            raise RuntimeError(
                f"horovod.run: the ranks ended with exit code {done.returncode}; their output has the reason"
            )
        files = sorted(directory.glob(f"{RESULT}.*"), key=lambda file: int(file.suffix[1:]))
        return [pickle.loads(file.read_bytes()) for file in files]


def _pickled(value: Any) -> bytes:
    try:
        pickler = importlib.import_module("cloudpickle")
    except ImportError:
        pickler = pickle
    try:
        content: bytes = pickler.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"horovod.run: found a function that cannot be sent to other processes ({error}), expected one at the top of a "
            "module; or install cloudpickle"
        ) from error
    return content
