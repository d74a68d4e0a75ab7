"""The measurement of what a trainer adds to a small step: each loop in processes of its own, in turns. Imports no torch."""

from __future__ import annotations

import gc
import importlib.util
import json
import math
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import nullcontext

from hpctrain.base.child_python import python_module
from hpctrain.base.safe_files import scratch_directory
from hpctrain.toolkit.commands import UsageError, say

BATCHES = (32, 1024)
"""Global batches: the small one is all overhead, in the large one arithmetic and loading weigh as well."""
NAMES = {
    "plain": "torch", "own-loop": "hpctrain", "run": "hpctrain", "accelerate": "accelerate", "fabric": "lightning",
    "lightning": "lightning",
}  # fmt: skip
"""The libraries of the loops by the loops' names; the first is the reference."""
# a large batch has this share of a small one's steps
_LARGE = 5
# seconds of a round of one loop
_LIMIT = 300.0

Found = dict[str, dict[int, float]]
"""Milliseconds a step in the quickest round, by loop and batch."""


def chosen(only: str | None) -> list[str]:
    """The loops to measure. Raises UsageError for unknown ones."""
    names = list(NAMES) if only is None else only.split(",")
    unknown = [one for one in names if one not in NAMES]
    if unknown:
        raise UsageError(f"--only: unknown {unknown[0]}; expected some of {', '.join(NAMES)}")
    return names


def missing(name: str) -> str:
    """The line that says why a loop is left out; "" where its library is installed."""
    library = NAMES[name]
    return (
        ""
        if importlib.util.find_spec(library)
        else f"{name:<12}left out: {library} is not installed (pip install {library})"
    )


def measure(names: Sequence[str], ranks: int, steps: int, rounds: int) -> Found:
    """The loops in turns, each turn in new processes with one thread a rank."""
    found: Found = {name: dict.fromkeys(BATCHES, math.inf) for name in names}
    for _ in range(rounds):
        for name in names:
            for batch, milliseconds in _in_processes(name, ranks, steps).items():
                found[name][int(batch)] = min(milliseconds, found[name][int(batch)])
    return found


def _in_processes(name: str, ranks: int, steps: int) -> Mapping[str, float]:
    words = ["--only", name, "-n", str(ranks), "--steps", str(steps), "--rounds", "1", "--json"]
    command = python_module("hpctrain", "bench", "overhead", *words)
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LIMIT)
    except subprocess.TimeoutExpired:
        raise UsageError(f"{name} took more than {_LIMIT:g} s; take fewer --steps") from None
    if done.returncode:
        say(done.stderr, err=True)
        raise SystemExit(done.returncode)
    of_loop: Mapping[str, float] = json.loads(done.stdout)[name]
    return of_loop


def here(name: str, steps: int) -> dict[int, float]:
    """Milliseconds a step of one loop by batch, on the ranks that call this. Collective."""
    import torch.distributed as dist

    from hpctrain.base.devices import device_of_rank, is_accelerator, use_device
    from hpctrain.ranks.detection import detect, torchrun_variables
    from hpctrain_tools.bench.overhead_loops import LOOPS, OF_HPCTRAIN, Timed
    from hpctrain_tools.bench.running import silent

    identity, found = detect(), dict[int, float]()
    device = device_of_rank(identity.local_rank)
    use_device(device)
    among_others = identity.size > 1 and name not in OF_HPCTRAIN
    with torchrun_variables(identity) if among_others else nullcontext():
        if among_others:
            import hpctrain.mpi  # noqa: F401  (offers init_method mpi://)

            of_device = dist.Backend.default_device_backend_map.get(device.type, "gloo")
            backend = f"cpu:gloo,{device.type}:{of_device}" if is_accelerator(device) else "gloo"
            dist.init_process_group(backend, init_method="mpi://")
        for batch in BATCHES:
            with scratch_directory("bench-") as directory, silent():
                timed = Timed(
                    batch,
                    steps if batch == BATCHES[0] else max(1, steps // _LARGE),
                    identity,
                    device,
                    str(directory / "run"),
                )
                gc.freeze()  # else one collection of all that torch imports, 0.1 s, falls into one loop's steps
                LOOPS[name](timed)
            found[batch] = 1e3 * timed.seconds / timed.steps
        if dist.is_initialized():
            dist.destroy_process_group()
    return found if identity.rank == 0 else {}


def lines(found: Found, ranks: int) -> list[str]:
    """A table: the quickest round of each loop, and its ratio to the first loop's."""
    heads = "".join(f"{f'batch {batch}':>22}" for batch in BATCHES)
    told = [f"{ranks} rank{'s' * (ranks > 1)}, milliseconds a step, the quickest round", f"{'':12}{heads}"]
    first = next(iter(found.values()))
    for name, of_batch in found.items():
        shown = (f"{of_batch[batch]:.2f}  x{of_batch[batch] / first[batch]:.2f}" for batch in BATCHES)
        told.append(f"{name:12}" + "".join(f"{one:>22}" for one in shown))
    return told
