"""Layouts of several axes: the losses and gradient norms are those of a plain loop in one process."""

from __future__ import annotations

from collections import Counter
from functools import partial
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from equivalence_table import BOUNDS
from test_stages import OPTIMIZERS, compare, reference
from training import job, train_here

from hpctrain.base.accounting import statistics
from hpctrain.base.errors import EnvironmentUnfitError
from hpctrain.checking.check import check
from hpctrain.job.raw import RawJob
from hpctrain.model.mesh import build_meshes, layout_of

pytestmark = pytest.mark.usefixtures("world")

TENSOR, SEQUENCE = {"size": 2}, {"size": 2, "sequence_parallel": True}
ULYSSES = {"size": 2, "method": "ulysses"}
INTERLEAVED = {"size": 2, "schedule": "interleaved-1f1b", "stages_per_rank": 2}
ZERO_BUBBLE = {"size": 2, "schedule": "zero-bubble", "stages_per_rank": 2}
ZBV = {"size": 2, "schedule": "zbv", "stages_per_rank": 2}
DUALPIPE_V = {"size": 2, "schedule": "dualpipe-v", "stages_per_rank": 2}
GPIPE = {"size": 2, "schedule": "gpipe"}

CHECKPOINTING = {"full, partitioned": {"mode": "full", "partition_activations": True}}

# parallelism, stage, optimizer, micro batches per step, activation checkpointing
ONE_AXIS: list[tuple[dict[str, Any], int, str, int, str]] = [
    ({"tensor": TENSOR}, 0, "adamw", 1, "none"),
    ({"tensor": TENSOR}, 1, "sgd", 2, "none"),
    ({"tensor": TENSOR}, 2, "sgd", 2, "full"),
    ({"tensor": TENSOR}, 3, "sgd", 1, "none"),
    ({"tensor": SEQUENCE}, 0, "sgd", 2, "full"),
    ({"tensor": SEQUENCE}, 3, "adamw", 2, "none"),
    ({"context": 2}, 0, "sgd", 2, "none"),
    ({"context": 2}, 3, "sgd", 1, "selective"),
    ({"context": ULYSSES}, 0, "adamw", 1, "none"),
    ({"context": ULYSSES}, 3, "sgd", 2, "none"),
    ({"pipeline": 2}, 0, "sgd", 2, "full"),
    ({"pipeline": 2}, 1, "sgd", 4, "none"),
    ({"pipeline": 2}, 2, "adamw", 4, "none"),
    ({"pipeline": GPIPE}, 0, "sgd", 4, "none"),
    ({"pipeline": INTERLEAVED}, 2, "sgd", 2, "none"),
    ({"pipeline": ZERO_BUBBLE}, 1, "sgd", 2, "none"),
    ({"pipeline": ZBV}, 0, "adamw", 2, "full"),
    ({"pipeline": ZBV}, 2, "sgd", 4, "none"),
    ({"pipeline": DUALPIPE_V}, 1, "sgd", 4, "none"),
    ({"pipeline": DUALPIPE_V}, 0, "adamw", 6, "none"),
    ({"tensor": TENSOR}, 0, "sgd", 2, "full, partitioned"),
]
MORE_AXES = [
    ({"context": 4}, 0, "sgd", 1, "none"),
    ({"context": 2, "tensor": SEQUENCE}, 3, "sgd", 1, "none"),
    ({"pipeline": 2, "tensor": SEQUENCE}, 1, "sgd", 2, "full"),
    ({"pipeline": 2, "context": 2}, 2, "sgd", 2, "none"),
    ({"context": 2, "replicate": 2}, 2, "sgd", 1, "none"),
    ({"pipeline": 2, "tensor": TENSOR}, 1, "sgd", 2, "full, partitioned"),
]
EIGHT = [  # with a data axis of 2
    ({"pipeline": 2, "tensor": TENSOR}, 0, "sgd", 2, "none"),
    ({"pipeline": ZERO_BUBBLE, "tensor": SEQUENCE}, 2, "adamw", 2, "none"),
    ({"context": 2, "tensor": SEQUENCE}, 3, "sgd", 2, "full"),
    ({"tensor": TENSOR, "replicate": 2}, 3, "sgd", 1, "none"),
]
SIXTEEN = [({"pipeline": 2, "context": 2, "tensor": SEQUENCE}, 2, "sgd", 2, "none")]


TIED = [
    pytest.param(({"pipeline": GPIPE}, 0, "sgd", 4, "none"), marks=pytest.mark.shown_on(2)),
    pytest.param(({"pipeline": INTERLEAVED}, 2, "adamw", 2, "full"), marks=pytest.mark.shown_on(2)),
    pytest.param(({"pipeline": ZERO_BUBBLE}, 1, "sgd", 2, "none"), marks=pytest.mark.shown_on(2)),
    pytest.param(({"pipeline": ZBV}, 1, "sgd", 4, "none"), marks=pytest.mark.shown_on(2)),
    ({"pipeline": 2, "tensor": SEQUENCE}, 1, "sgd", 2, "none"),
    pytest.param(({"tensor": TENSOR}, 3, "sgd", 1, "none"), marks=pytest.mark.shown_on(2)),
    ({"replicate": 2}, 1, "sgd", 1, "none"),
]


def size(axis: Any) -> int:
    return axis if isinstance(axis, int) else int(axis["size"])


def run(
    root, record, case: tuple[dict[str, Any], int, str, int, str], mode: str = "fp32", **model: Any
) -> dict[str, Any]:
    parallelism, stage, optimizer, micro_batches, checkpointing = case
    used = prod(size(axis) for name, axis in parallelism.items() if name != "replicate")
    needed = prod(map(size, parallelism.values()))
    if dist.get_world_size() % needed:
        pytest.skip(f"needs a multiple of {needed} ranks")
    pipeline = parallelism.get("pipeline", 1)
    tables = job(
        job={"output_dir": str(root)}, optimizer=OPTIMIZERS[optimizer], sharding={"stage": stage},
        model={"layers": 4 if isinstance(pipeline, dict) and "stages_per_rank" in pipeline else 2, **model},
        batch={"micro_size": 24 * used // dist.get_world_size() // micro_batches}, parallelism=parallelism,
        activation_checkpointing=CHECKPOINTING.get(checkpointing, {"mode": checkpointing}), precision={"mode": mode},
    )  # fmt: skip
    rows = train_here(tables).rows
    dtype = torch.float64 if mode == "fp64" else torch.float32
    found = compare(rows, reference(tables, dtype)[1], *BOUNDS[mode])
    if mode in ("bf16", "fp16"):
        assert found["loss"] > 1e-7, "16 bits cannot give the same numbers"
    words = layout_words(parallelism) + (", tied embeddings" if model.get("tie_embeddings") else "")
    record(mode, f"stage {stage}, {words}", found, optimizer, micro_batches > 1, checkpointing)
    return tables


def layout_words(parallelism: dict[str, Any]) -> str:
    def word(name: str, axis: Any) -> str:
        options = (
            [] if isinstance(axis, int) else [str(v) if v is not True else k for k, v in axis.items() if k != "size"]
        )
        return f"{name} {size(axis)}" + (f" ({', '.join(options)})" if options else "")

    return " x ".join(word(name, axis) for name, axis in parallelism.items())


def label(case: Any) -> str:
    return "-".join(case[0]) + f"-stage{case[1]}-{case[2]}" if isinstance(case, tuple) else str(case)


FP64 = [ONE_AXIS[3], ONE_AXIS[6], ONE_AXIS[12]]
IN_16_BITS = [ONE_AXIS[1], ONE_AXIS[5], ONE_AXIS[6], ONE_AXIS[11]]


def one_axis(case: Any) -> Any:
    """Stages need data-parallel ranks, which 2 ranks with another axis don't have. One precision of a case is enough by default."""
    marks = [pytest.mark.shown_on(4)] if case[1] and "context" not in case[0] else []
    return pytest.param(case, marks=[*marks, pytest.mark.nightly] if case in FP64 + IN_16_BITS else marks)


@pytest.mark.cases(
    default=["pipeline-stage0-sgd0"], thorough=["tensor-stage0-adamw", "context-stage0-adamw"], rest="nightly"
)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", map(one_axis, ONE_AXIS), ids=label)
def test_one_axis(root, record, case) -> None:
    run(root, record, case)


@pytest.mark.cases(default=["pipeline-stage2-adamw"], rest="thorough")
@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", FP64, ids=label)
@pytest.mark.shown_on(4)
def test_fp64(root, record, case) -> None:
    run(root, record, case, "fp64")


@pytest.mark.cases(
    default=["replicate-stage1-sgd"], thorough=["pipeline-stage1-sgd1", "tensor-stage3-sgd"], rest="nightly"
)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", TIED, ids=label)
def test_an_embedding_that_is_also_the_head(root, record, case) -> None:
    run(root, record, case, tie_embeddings=True)


CHUNKED = [({}, 3, "sgd", 2, "none"), ONE_AXIS[1], ONE_AXIS[3], ONE_AXIS[7]]


@pytest.mark.cases(default=["-stage3-sgd"], thorough=["tensor-stage1-sgd"], rest="nightly")
@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", CHUNKED, ids=label)
def test_a_loss_in_chunks(root, case) -> None:
    """As with whole logits; the last chunk has fewer tokens."""
    run(root, lambda *_: None, case, loss_chunk=37)


@pytest.mark.cases(
    default=["bf16-context-stage0-sgd", "bf16-pipeline-stage1-sgd"], thorough=["bf16-tensor-stage1-sgd"], rest="nightly"
)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", IN_16_BITS, ids=label)
@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=pytest.mark.shown_on(size)) for mode, size in (("bf16", 2), ("fp16", 4))]
)
def test_16_bits(root, record, mode: str, case) -> None:
    run(root, record, case, mode)


@pytest.mark.ranks(2)
@pytest.mark.shown_on(2)
@pytest.mark.parametrize("sequence", [False, True])
def test_activations_travel_as_products_take_them(root, sequence: bool) -> None:
    """bf16 halves what the blocks send, forwards and backwards; embeddings stay in float32."""

    def sent(mode: str) -> Counter[str]:
        before = _bytes_by_operation()
        axis = {"tensor": {"size": 2, "sequence_parallel": sequence}}
        train_here(job(job={"output_dir": str(root / mode)}, parallelism=axis, precision={"mode": mode}))
        return _bytes_by_operation() - before

    wide, narrow = sent("fp32"), sent("bf16")
    large = {name for name, count in wide.items() if count > 100_000}
    assert large == ({"all_gather_into_tensor", "reduce_scatter_tensor"} if sequence else {"all_reduce"}), wide
    for name in large:
        assert 0.5 < narrow[name] / wide[name] < 0.58, (name, narrow[name], wide[name])


def _bytes_by_operation() -> Counter[str]:
    found: Counter[str] = Counter()
    for operations in statistics().groups.values():
        found.update({name: one.bytes for name, one in operations.items()})
    return found


@pytest.mark.thorough
@pytest.mark.ranks(2)
@pytest.mark.shown_on(2)
def test_compiled_blocks_around_a_ring(root, monkeypatch) -> None:
    """Traced by Dynamo, but run without generated code, which takes a minute."""
    frames: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        frames.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    tables = job(
        job={"output_dir": str(root), "steps": 2}, parallelism={"context": 2}, optimizer=OPTIMIZERS["sgd"],
        batch={"micro_size": 6}, compile={"enabled": True},
    )  # fmt: skip
    compare(train_here(tables).rows, reference(tables)[1], *BOUNDS["fp32"])
    assert len(frames) > 3, "of each block, what is before the ring and what is after it, and the loss"
    torch._dynamo.reset()


@pytest.mark.cases(nightly=["2"])
@pytest.mark.ranks(2)
@pytest.mark.shown_on(2)
@pytest.mark.parametrize("stage", [1, 2])
def test_buckets_that_are_full_at_other_times_on_other_ranks(root, stage: int) -> None:
    """The head has 31 rows on one rank and 30 on the other, so the gradients of the last norm are in different buckets."""
    tables = job(
        job={"output_dir": str(root), "steps": 2}, parallelism={"tensor": SEQUENCE}, optimizer=OPTIMIZERS["sgd"],
        batch={"micro_size": 12}, sharding={
            "stage": stage, "overlap_communication": True, "reduce_bucket_size": 32 * 20 * 4,
        },
    )  # fmt: skip
    compare(train_here(tables).rows, reference(tables)[1], *BOUNDS["fp32"])


@pytest.mark.cases(nightly=["1"], rest="thorough")
@pytest.mark.ranks(4)
@pytest.mark.shown_on(4)
@pytest.mark.parametrize("stage", [1, 2])
def test_a_save_where_tensor_ranks_hold_unequal_parts(root, stage: int) -> None:
    """A tensor that both ranks hold whole lies between unequally cut matrices. It is written once."""
    tables = job(
        job={"output_dir": str(root), "steps": 1}, parallelism={"tensor": SEQUENCE}, optimizer=OPTIMIZERS["sgd"],
        model={"hidden_size": 6, "vocab_size": 49, "max_seq_length": 32, "tie_embeddings": True},
        batch={"micro_size": 12}, sharding={"stage": stage}, precision={"mode": "fp64"},
    )  # fmt: skip
    rows = train_here(tables).rows
    tables["job"]["steps"], tables["parallelism"] = 2, {}
    tables["batch"]["micro_size"] = 6
    compare([*rows, *train_here(tables).rows], reference(tables, torch.float64)[1], *BOUNDS["fp64"])


@pytest.mark.nightly
@pytest.mark.ranks(4)
def test_units_of_stage_3_in_blocks_of_which_some_outputs_are_kept(root) -> None:
    """Backward gathers inside a block what forward had prefetched before it."""
    tables = job(
        job={"output_dir": str(root), "steps": 2}, parallelism={"context": 2, "tensor": SEQUENCE}, batch={"micro_size": 12},
        optimizer=OPTIMIZERS["sgd"], sharding={"stage": 3, "wrap": "size", "min_parameters": 1, "prefetch": 1},
        activation_checkpointing={"mode": "selective", "keep": ["addmm", "bmm"]},
    )  # fmt: skip
    compare(train_here(tables).rows, reference(tables)[1], *BOUNDS["fp32"])


@pytest.mark.cases(default=["context-replicate-stage2-sgd"], thorough=["pipeline-tensor-stage1-sgd1"], rest="nightly")
@pytest.mark.ranks(4)
@pytest.mark.parametrize("case", MORE_AXES, ids=label)
def test_more_axes(root, record, case) -> None:
    run(root, record, case)


@pytest.mark.ranks(8)
@pytest.mark.parametrize("case", EIGHT, ids=label)
def test_eight_ranks(root, record, case) -> None:
    run(root, record, case)


@pytest.mark.ranks(16)
@pytest.mark.parametrize("case", SIXTEEN, ids=label)
def test_four_dimensions(root, record, case) -> None:
    run(root, record, case)


@pytest.mark.nightly
@pytest.mark.ranks(4)
@pytest.mark.shown_on(4)
def test_the_next_job_of_a_process_has_groups_of_its_own(root) -> None:
    """Both have an axis tp of the same ranks. DTensor remembers groups on each thread; gradients on accelerators have their own."""

    def losses(name: str, **tables: Any) -> list[float]:
        tables = job(job={"output_dir": str(root / name), "steps": 4}, **tables)
        return [row["loss"] for row in train_here(tables).rows]

    first, other = {"tensor": SEQUENCE}, {"tensor": SEQUENCE, "pipeline": 2}
    batch = {"micro_size": 3}
    alone = losses("first", parallelism=first, batch=batch)
    assert losses("pipeline", parallelism=other, batch=batch) == pytest.approx(alone, rel=1e-5)
    assert losses("again", parallelism=first, batch=batch) == alone


@pytest.mark.cases(thorough=["{'context': 2}"], nightly=["{'tensor': 2}"])
@pytest.mark.ranks(2)
@pytest.mark.parametrize("parallelism", [{"tensor": 2}, {"context": 2}, {"pipeline": 2}], ids=str)
@pytest.mark.shown_on(2)
def test_evaluation_counts_each_sample_once(root, parallelism) -> None:
    """A validation split that no number of ranks divides."""
    if dist.get_world_size() % 2:
        pytest.skip("needs an even number of ranks")
    tables = job(
        job={"output_dir": str(root), "steps": 2}, parallelism=parallelism, evaluation={"every_steps": 2},
        dataset={"name": "synthetic", "samples": 500, "validation_samples": 45}, batch={"micro_size": 2},
    )  # fmt: skip
    (row,) = train_here(tables).evaluations
    assert row["evaluation_tokens"] == 45 * 8
    alone = job(**{k: v for k, v in tables.items() if k != "parallelism"}, parallelism={})
    alone["job"]["output_dir"] = str(root / "data")
    (other,) = train_here(alone).evaluations
    assert row["evaluation_loss"] == pytest.approx(other["evaluation_loss"], rel=2e-6)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (dist.DistBackendError("Duplicate GPU detected"), "can't communicate on cpu: Duplicate GPU detected"),
        (None, "each gave 1 to a sum on cpu: found 1, expected"),
    ],
)
def test_a_group_that_can_not_sum_is_named(root, monkeypatch, error: Exception | None, sentence: str) -> None:
    checked = check(
        RawJob(job(job={"output_dir": str(root)}, batch={"micro_size": 24 // dist.get_world_size()}), {}, "job"),
        dist.get_world_size(),
    )

    def all_reduce(tensor: torch.Tensor, **named: Any) -> None:
        if error is not None:
            raise error

    layout = layout_of(checked.job, checked.parts, dist.get_world_size())
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    ranks = f"the ranks of dp_replicate, ranks 0-{dist.get_world_size() - 1}, "
    with pytest.raises(EnvironmentUnfitError, match=ranks + sentence):
        build_meshes(layout, torch.device("cpu"))
