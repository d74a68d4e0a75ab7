"""Random jobs, each trained in one layout and then, from its checkpoint, in another, must have the curve of one process.

    OMP_NUM_THREADS=1 mpiexec -n 4 python -m pytest tests/ranks/test_random_layouts.py --draws 200

draws this many instead of the few of every run. A failure prints the two jobs.
"""

from __future__ import annotations

import json
import random
from fnmatch import fnmatchcase
from functools import partial
from itertools import islice
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from equivalence_table import BOUNDS
from plain import batches_of, gpt_loss, module_of, samples_of, train_plainly
from test_stages import compare
from test_token_batches import losses_of, mean_loss
from training import train_here

from hpctrain.checking.check import check
from hpctrain.job.problems import JobError
from hpctrain.job.raw import RawJob

pytestmark = pytest.mark.usefixtures("world")

STEPS, GLOBAL_SIZE = 6, 48
OPTIMIZERS: list[dict[str, Any]] = [
    {"name": "adamw", "lr": 0.003, "weight_decay": 0.1},
    {"name": "sgd", "lr": 0.3, "momentum": 0.9, "clip_norm": 0.36},
    {"name": "sgd", "lr": 0.2, "clip_norm": 0.5, "groups": [{"pattern": ["*.bias", "*norm*"], "lr": 0.05}]},
    {"name": "adamw", "lr": 0.01, "clip_norm": 1.0, "groups": [{"pattern": "layers.*.mlp.*", "weight_decay": 0.3}]},
]
FREEZE: list[list[str]] = [
    [], [], [], ["token_embedding.*"], ["*norm*"], ["layers.0.*"], ["head.*", "layers.*.attention.*"], ["*.bias"],
]  # fmt: skip


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("seed", range(metafunc.config.getoption("--draws") or 2))


def drawn_job(draw: random.Random) -> dict[str, Any]:
    """The options that the curve depends on."""
    heads = draw.choice([1, 2, 4, 6])
    tie, seq, tokens = draw.random() < 0.3, draw.choice([16, 24, 32]), draw.random() < 0.15
    return {
        "job": {"name": "random", "seed": draw.randrange(1000), "steps": STEPS},
        "model": {
            "name": "gpt", "hidden_size": heads * draw.choice([3, 4, 6]), "layers": draw.choice([1, 2, 4, 6]),
            "attention_heads": heads, "vocab_size": draw.randint(7, 70), "max_seq_length": seq, "tie_embeddings": tie,
            "freeze": draw.choice(FREEZE[:-2] if tie else FREEZE),
        },
        "dataset": {
            "name": "synthetic", "samples": 100, "validation_samples": draw.randint(1, 30),
            **({"min_length": 1} if tokens else {}),
        },
        "optimizer": draw.choice(OPTIMIZERS),
        "precision": {"mode": draw.choice(["fp32", "fp64", "fp64"])},
        "evaluation": {"every_steps": draw.choice([1, 2, 3])},
        "batch": {"tokens": seq * draw.randint(3, 30)} if tokens else {"global_size": GLOBAL_SIZE},
    }  # fmt: skip


def drawn_layout(draw: random.Random, ranks: int, job: dict[str, Any]) -> dict[str, Any]:
    """The options that the curve must not depend on."""
    parallelism: dict[str, Any] = {}
    rest = ranks
    for name, options in draw.sample([("tensor", _tensor), ("context", _context), ("pipeline", _pipeline)], 3):
        size = draw.choice([s for s in range(1, rest + 1) if rest % s == 0])
        if size > 1 and draw.random() < 0.7:
            parallelism[name] = {"size": size, **options(draw)}
            rest //= size
    stage = draw.randint(0, 2 if "pipeline" in parallelism else 3)
    if stage and rest > 1 and draw.random() < 0.3:
        parallelism["replicate"] = draw.choice([s for s in range(1, rest + 1) if rest % s == 0])
    micro = (
        {"micro_size": GLOBAL_SIZE // rest // draw.choice([1, 2, 3, 4, 6, 12])}
        if "global_size" in job["batch"]
        else {"micro_tokens": job["model"]["max_seq_length"] * draw.randint(1, 3)}
    )
    return {
        "parallelism": parallelism,
        "sharding": {"stage": stage, **_sharding(draw, stage)},
        "batch": {**job["batch"], **micro},
        "activation_checkpointing": _checkpointing(draw),
        "compression": draw.choice([{}, {}, {"name": "top-k", "ratio": 1.0}]),
        "checkpoint": {"format": draw.choice(["hdf5", "hdf5", "dcp"]), "asynchronous": draw.random() < 0.5},
    }


def _tensor(draw: random.Random) -> dict[str, Any]:
    return {"sequence_parallel": draw.random() < 0.5}


def _context(draw: random.Random) -> dict[str, Any]:
    return {"method": draw.choice(["ring", "ulysses"])}


def _pipeline(draw: random.Random) -> dict[str, Any]:
    schedule = draw.choice(["gpipe", "1f1b", "interleaved-1f1b", "zero-bubble", "zbv", "dualpipe-v"])
    if schedule in ("zbv", "dualpipe-v"):
        return {"schedule": schedule}
    per_rank = draw.randint(2, 3) if schedule in ("interleaved-1f1b", "zero-bubble") else 1
    return {"schedule": schedule, "stages_per_rank": per_rank}


def _sharding(draw: random.Random, stage: int) -> dict[str, Any]:
    sizes = [200, "1KB", 4000, "1MB"]
    options: dict[str, list[Any]] = {
        "reduce_bucket_size": sizes if stage < 3 else [],
        "overlap_communication": [True, False] if stage < 3 else [],
        "allgather_bucket_size": sizes if stage in (1, 2) else [],
        "offload_optimizer": [True, False] if stage else [],
        "reshard_after_forward": [True, False] if stage == 3 else [],
        "offload_parameters": [True, False] if stage == 3 else [],
        "prefetch": [0, 1, 2] if stage == 3 else [],
        "wrap": ["block", "size", "class:MLP"] if stage == 3 else [],
    }
    chosen = {key: draw.choice(values) for key, values in options.items() if values and draw.random() < 0.5}
    return {**chosen, "min_parameters": draw.choice([1, 300, 3000])} if chosen.get("wrap") == "size" else chosen


def _checkpointing(draw: random.Random) -> dict[str, Any]:
    mode = draw.choice(["none", "none", "full", "selective"])
    if mode == "full":
        names = ("offload", "partition_activations")
        return {"mode": mode, "every": draw.randint(1, 3), **{name: draw.random() < 0.3 for name in names}}
    if mode == "selective":
        return {"mode": mode, "keep": draw.choice([[], ["mm"], ["addmm", "bmm"]]), "keep_every": draw.randint(1, 3)}
    return {"mode": mode}


def two_layouts(seed: int, ranks: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A job in two layouts that are not refused."""
    draw = random.Random(f"{seed} on {ranks}")
    while True:
        job = drawn_job(draw)
        tried = ({**job, **drawn_layout(draw, ranks, job)} for _ in range(50))
        accepted = list(islice((tables for tables in tried if is_accepted(ranks, tables)), 2))
        if len(accepted) == 2:
            first, second = (json.loads(json.dumps(tables)) for tables in accepted)  # separate copies
            return first, second


def is_accepted(ranks: int, tables: dict[str, Any]) -> bool:
    cut = 2 * prod(tables["parallelism"].get(axis, {"size": 1})["size"] for axis in ("context", "tensor"))
    if tables["model"]["max_seq_length"] % cut:
        return False  # reported when the dataset is opened
    try:
        check(RawJob(tables, {}, "random"), ranks)
    except JobError:
        return False
    return True


def plainly(tables: dict[str, Any]) -> tuple[list[tuple[float, float]], float]:
    """Losses and norms of one process, and its loss on the validation split."""
    dtype = torch.float64 if tables["precision"]["mode"] == "fp64" else torch.float32
    module = module_of(tables, dtype)
    options = {k: v for k, v in tables["optimizer"].items() if k not in ("name", "clip_norm", "groups")}
    patterns = [group["pattern"] for group in tables["optimizer"].get("groups", [])]
    special = {k: v for group in tables["optimizer"].get("groups", []) for k, v in group.items() if k != "pattern"}
    groups: list[dict[str, Any]] = [{"params": []}, {"params": [], **special}]
    for name, parameter in module.named_parameters():
        if any(fnmatchcase(name, pattern) for pattern in tables["model"]["freeze"]):
            parameter.requires_grad_(False)
        else:
            matches = any(fnmatchcase(name, p) for one in patterns for p in ([one] if isinstance(one, str) else one))
            groups[matches]["params"].append(parameter)
    optimizer = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[tables["optimizer"]["name"]](groups, **options)
    whole = (partial(gpt_loss, module, *batch) for batch in batches_of(tables))
    losses = losses_of(tables, module) if "tokens" in tables["batch"] else whole
    steps = train_plainly(module, optimizer, losses, tables["optimizer"].get("clip_norm"))
    samples = samples_of(tables, "validation")
    with torch.no_grad():
        return steps, mean_loss(module, [samples[i] for i in range(len(samples))]).item()


def test_two_random_layouts(root, seed: int) -> None:
    first, second = two_layouts(seed, dist.get_world_size())
    told = json.dumps([first, second])
    try:
        try:
            follow_one_process(first, second, str(root / "drawn"))
        except AssertionError:
            if first["precision"]["mode"] != "fp32":
                raise
            # some trainings amplify rounding errors without end: these must agree in float64
            in_fp64 = [{**tables, "precision": {"mode": "fp64"}} for tables in (first, second)]
            follow_one_process(*in_fp64, str(root / "fp64"))
    except BaseException as error:
        error.add_note(told)
        raise


def follow_one_process(first: dict[str, Any], second: dict[str, Any], directory: str) -> None:
    """Train the first half in one layout and the rest in the other."""
    steps, evaluated = plainly(first)
    losses, norms = BOUNDS[first["precision"]["mode"]]
    if losses > 1e-9:
        losses, norms = 10 * losses, 10 * norms  # AdamW amplifies rounding errors
    half = {**first, "job": {**first["job"], "steps": STEPS // 2, "output_dir": directory}}
    rows = train_here(half).rows
    ended = train_here({**second, "job": {**second["job"], "output_dir": directory}})
    assert [row["step"] for row in [*rows, *ended.rows]] == list(range(1, STEPS + 1))
    compare([*rows, *ended.rows], steps, losses, norms)
    assert ended.evaluations[-1]["evaluation_loss"] == pytest.approx(evaluated, rel=losses)
