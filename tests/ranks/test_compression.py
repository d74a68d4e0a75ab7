"""Compressed gradients and residuals, compared with plain torch; stages, replicas, resume and loss scaling."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hpctrain_plugins.compression.powersgd import PowerSGDCompressor
from hpctrain_plugins.compression.top_k import TopKCompressor
from torch import Tensor
from training import SGD, Rows, job, session_of, train_here

import hpctrain.mpi
from hpctrain.api import Compressor, GradientBucket, Piece, Span
from hpctrain.mpi.library import MPI
from hpctrain.ranks.json_collectives import gather_values
from hpctrain.ranks.signals import StopRequest
from hpctrain.training.loop import train
from hpctrain.training.session import Session

pytestmark = pytest.mark.usefixtures("world")


def only(ranks: int) -> pytest.MarkDecorator:
    """For tests that would show nothing more on another number of ranks."""
    return pytest.mark.skipif(MPI.COMM_WORLD.size != ranks, reason=f"for {ranks} ranks")


SHAPES = [(), (7,), (61, 20), (13, 5, 3), (2, 2), (20, 61)]
"""Uneven shapes: one dim or none, too small to factor, and more than two dims."""
PADDING = 5
TOP_K = {"name": "top-k", "ratio": 0.05}
POWERSGD = {"name": "powersgd", "rank": 2}


def bucket_of(shapes: Sequence[tuple[int, ...]]) -> GradientBucket:
    spans, end = [], 0
    for number, shape in enumerate(shapes):
        spans.append(Span(Piece.whole(f"p{number}", torch.empty(shape)), end))
        end += spans[-1].numel
    return GradientBucket(spans, end + PADDING, torch.float64, torch.device("cpu"))


def gradients_of(bucket: GradientBucket, step: int, rank: int) -> Tensor:
    """The gradients of any rank, computed on every rank. Later parameters have larger gradients."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    flat = torch.zeros(bucket.numel, dtype=torch.float64)
    for number, span in enumerate(bucket.spans):
        span.view(flat).copy_(torch.randn(span.piece.tensor.shape, generator=generator) * 10.0**number)
    return flat


def summed(tensor: Tensor) -> Tensor:
    total = tensor.clone()
    dist.all_reduce(total)
    return total


def assert_equal_on_all_ranks(tensor: Tensor) -> None:
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, tensor)
    assert all(torch.equal(one, tensor) for one in everyone)


def compressors(bucket: GradientBucket) -> list[Compressor]:
    world = dist.group.WORLD
    assert world is not None
    return [TopKCompressor(bucket, world, 0.03), PowerSGDCompressor(bucket, world, 2)]


def test_nothing_is_lost_and_all_ranks_get_the_same_bits() -> None:
    """All sent values plus the residuals are the sum of all gradients, whatever the loss scale of a step."""
    bucket = bucket_of(SHAPES)
    for compressor in compressors(bucket):
        sent, due = torch.zeros(bucket.numel, dtype=torch.float64), torch.zeros(bucket.numel, dtype=torch.float64)
        for step, scale in enumerate([1.0, 1024.0, 1024.0, 512.0, 1.0, 3.0]):
            gradients = gradients_of(bucket, step, dist.get_rank()) * scale
            due += summed(gradients) / scale
            compressor.all_reduce(gradients, scale)
            assert_equal_on_all_ranks(gradients)
            sent += gradients / scale
            if step == 3:
                compressor.consolidate()
        kept = summed(compressor.state()[0])
        assert torch.count_nonzero(kept) > bucket.numel // 2, "something must be left out"
        torch.testing.assert_close(sent + kept, due, rtol=1e-12, atol=1e-9)


def test_a_bucket_of_padding_only() -> None:
    for compressor in compressors(GradientBucket([], 16, torch.float64, torch.device("cpu"))):
        gradients = torch.zeros(16, dtype=torch.float64)
        compressor.all_reduce(gradients, 1.0)
        compressor.consolidate()
        assert not gradients.any() and compressor.pieces() == []


def test_a_slice_of_the_sum() -> None:
    """reduce_scatter gives each rank its part of all_reduce's result, in place or not."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    shapes = [(24 * ranks - PADDING - 24,), (6, 4)]  # 24 elements for each rank
    bucket = bucket_of(shapes)
    for whole, parts in zip(compressors(bucket), compressors(bucket), strict=True):
        for step, in_place in enumerate([True, False, False]):
            gradients = gradients_of(bucket, step, rank)
            other = gradients.clone()
            whole.all_reduce(gradients, 1.0)
            output = other.view(ranks, -1)[rank] if in_place else torch.empty(24, dtype=torch.float64)
            parts.reduce_scatter(output, other, 1.0)
            assert torch.equal(output, gradients.view(ranks, -1)[rank])


def test_top_k_in_plain_torch() -> None:
    bucket, ranks = bucket_of(SHAPES), dist.get_world_size()
    compressor = compressors(bucket)[0]
    memories = [torch.zeros(bucket.numel, dtype=torch.float64) for _ in range(ranks)]
    for step in range(5):
        expected = torch.zeros(bucket.numel, dtype=torch.float64)
        for rank, memory in enumerate(memories):
            memory += gradients_of(bucket, step, rank)
            for span in bucket.spans:
                count = -(-3 * span.numel // 100)
                mine, total = (flat[span.begin : span.begin + span.numel] for flat in (memory, expected))
                chosen = mine.abs().argsort(descending=True)[:count]
                total[chosen] += mine[chosen]
                mine[chosen] = 0
        gradients = gradients_of(bucket, step, dist.get_rank())
        compressor.all_reduce(gradients, 1.0)
        torch.testing.assert_close(gradients, expected, rtol=1e-14, atol=0)
        torch.testing.assert_close(compressor.state()[0], memories[dist.get_rank()], rtol=1e-14, atol=0)


def test_powersgd_in_plain_torch() -> None:
    """The sum is projected onto the span that one power iteration finds; each rank keeps the orthogonal part."""
    bucket, ranks, rank = bucket_of([(40, 30)]), dist.get_world_size(), dist.get_rank()
    compressor = compressors(bucket)[1]
    directions = compressor.state()[1].clone()  # (columns, rank); only their span matters
    memories = [torch.zeros(40, 30, dtype=torch.float64) for _ in range(ranks)]
    for step in range(4):
        memories = [m + gradients_of(bucket, step, r)[:1200].view(40, 30) for r, m in enumerate(memories)]
        total = torch.stack(memories).sum(0)
        reached = total @ directions
        projection = reached @ torch.linalg.pinv(reached)
        gradients = gradients_of(bucket, step, rank)
        compressor.all_reduce(gradients, 1.0)
        torch.testing.assert_close(gradients[:1200].view(40, 30), projection @ total)
        memories = [m - projection @ m for m in memories]
        torch.testing.assert_close(compressor.state()[0][:1200].view(40, 30), memories[rank])
        directions = total.T @ reached


def test_a_gradient_of_low_rank_travels_whole_and_one_that_vanished_comes_back() -> None:
    bucket = bucket_of([(40, 30)])
    compressor = compressors(bucket)[1]
    left, right = torch.randn(2, 40, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    matrix = left @ right[:30].T
    for factor in (1.0, 0.0, 2.0):
        gradients = torch.zeros(bucket.numel, dtype=torch.float64)
        gradients[:1200] = factor * matrix.flatten()
        expected = summed(gradients)
        compressor.all_reduce(gradients, 1.0)
        torch.testing.assert_close(gradients, expected, rtol=1e-9, atol=1e-9)


def test_what_is_not_finite_reaches_all_ranks() -> None:
    bucket = bucket_of(SHAPES)
    for value in (torch.inf, torch.nan):
        for compressor in compressors(bucket):
            gradients = gradients_of(bucket, 0, dist.get_rank())
            if dist.get_rank() == dist.get_world_size() - 1:
                gradients[bucket.spans[2].begin + 8] = value
            compressor.all_reduce(gradients, 1.0)
            assert not gradients.isfinite().all()


# ------------------------------------------------------------------ in training


def tables(root: Path, name: str, compression: dict[str, Any], steps: int = 4, **others: Any) -> dict[str, Any]:
    return job(
        job={"output_dir": str(root / name), "steps": steps}, batch={"micro_size": 24 // dist.get_world_size()},
        optimizer=SGD, compression=compression, **others,
    )  # fmt: skip


def losses(tables: dict[str, Any]) -> list[float]:
    return [row["loss"] for row in train_here(tables).rows]


@only(2)
def test_complex_gradients_travel_whole(root) -> None:
    """16 bits have no imaginary part, and the factors of a real matrix are not those of a complex one."""
    plain = tables(root, "bf16", {"name": "bf16"})
    with session_of(plain) as session:
        bucket = GradientBucket([], 2, torch.complex64, torch.device("cpu"))
        gradients = torch.tensor([1 + 2j, 3j]) * (dist.get_rank() + 1)
        session.model.sums.bucket(bucket, "dp_replicate").all_reduce(gradients)()
    assert gradients.tolist() == [3 + 6j, 9j]


@pytest.mark.thorough
@only(2)
def test_everything_kept_or_sent_is_as_without(root) -> None:
    whole = losses(tables(root, "none", {"name": "none"}))
    for number, compression in enumerate([{**TOP_K, "ratio": 1.0}, {**POWERSGD, "rank": 100}]):
        assert losses(tables(root, str(number), compression)) == pytest.approx(whole, rel=1e-6)
    assert losses(tables(root, "lossy", TOP_K)) != pytest.approx(whole, rel=1e-4)
    later = losses(tables(root, "later", {**TOP_K, "start_step": 2}))
    assert later[:3] == whole[:3] and later[3] != whole[3]


@pytest.mark.cases(nightly=["top-k"], rest="thorough")
@only(2)
@pytest.mark.parametrize("compression", [TOP_K, POWERSGD], ids=lambda one: one["name"])
def test_the_stages_agree(root, compression: dict[str, Any]) -> None:
    """For every owner of the sum and any number of buckets. A step of stage 2 is one backward here."""
    curves = [
        losses(tables(root, f"{stage} {size}", compression, sharding={"stage": stage, "reduce_bucket_size": size}))
        for stage, size in ((0, "25MB"), (0, 9000), (1, 9000), (2, 9000))
    ]
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], rel=2e-6)


@pytest.mark.thorough
@only(4)
def test_hybrid_sharding_compresses_between_the_replicas(root) -> None:
    """Slices of parameters are compressed separately."""
    layout = {"parallelism": {"replicate": 2}, "sharding": {"stage": 2, "reduce_bucket_size": 9000}}
    whole = losses(tables(root, "none", {"name": "none"}, **layout))
    for name, ratio in (("all", 1.0), ("some", 0.05)):
        before = hpctrain.mpi.statistics().operations["reduce_scatter_tensor"].calls
        found = losses(tables(root, name, {"name": "top-k", "ratio": ratio}, **layout))
        assert hpctrain.mpi.statistics().operations["reduce_scatter_tensor"].calls > before, "within a group"
        assert (found == pytest.approx(whole, rel=1e-6)) == (ratio == 1.0)


class Memory(Rows):
    """Records the residuals on this rank after each step, without loss scaling."""

    def __init__(self) -> None:
        super().__init__(self._note)
        self.session: Session | None = None
        self.states: list[list[Tensor]] = []

    def _note(self) -> None:
        assert self.session is not None
        self.states.append([tensor.clone() for tensor in self.session.model.sums._state()])


def remembered(tables: dict[str, Any]) -> Memory:
    memory = Memory()
    with session_of(tables, memory) as session:
        memory.session = session
        train(session, StopRequest())
    return memory


@pytest.mark.cases(nightly=["powersgd"])
@only(2)
@pytest.mark.parametrize("compression", [TOP_K, POWERSGD], ids=lambda one: one["name"])
def test_fp16_leaves_no_trace_of_a_step_left_out(root, compression: dict[str, Any]) -> None:
    """The scale is too high at first, and falls. Later, gradients and residuals are those of fp32."""
    options = {"sharding": {"stage": 2, "reduce_bucket_size": 9000}}
    precision = {"mode": "fp16", "initial_scale": 2.0**24, "hysteresis": 1, "window": 3}
    slow = {"name": "sgd", "lr": 1e-9}  # the model hardly changes: only the gradients count
    long = tables(root, "fp16", compression, steps=10, precision=precision, **options) | {"optimizer": slow}
    found = remembered(long)
    left_out = [row.get("skipped", False) for row in found.rows]
    assert left_out[0] and not all(left_out[:6])
    for number, skipped in enumerate(left_out):
        now = found.states[number]
        assert all(tensor.isfinite().all() for tensor in now)
        if skipped and number:
            assert all(torch.equal(a, b) for a, b in zip(now, found.states[number - 1], strict=True))
    first = left_out.index(False)
    assert found.states[-1] and first
    kept = sum(float(tensor.norm()) for tensor in found.states[-1][:1])
    plain = remembered(tables(root, "fp32", compression, steps=10, **options) | {"optimizer": slow})
    assert kept == pytest.approx(sum(float(t.norm()) for t in plain.states[-1][:1]), rel=0.5), "not times the scale"


@pytest.mark.cases(nightly=["0-{'name': 'powersgd', 'rank': 2}"], rest="thorough")
@only(3)
@pytest.mark.parametrize(("stage", "compression"), [(0, POWERSGD), (2, TOP_K)], ids=str)
def test_a_resumed_run_is_the_uninterrupted_one(root, stage: int, compression: dict[str, Any]) -> None:
    options = {"sharding": {"stage": stage}, "checkpoint": {"every_steps": 3}}
    straight = losses(tables(root, "straight", compression, 6, **options))
    losses(tables(root, "halves", compression, 3, **options))
    assert losses(tables(root, "halves", compression, 6, **options)) == straight[3:]


def kept_in_all(session: Session) -> dict[str, float]:
    """The sum of all ranks' residuals, by parameter."""
    mine = [(piece.name, float(piece.tensor.double().sum())) for piece in session.model.sums.pieces()]
    everyone: list[list[tuple[str, float]]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    totals: dict[str, float] = {}
    for name, value in (pair for one in everyone for pair in one if pair[0].startswith("residual/")):
        totals[name] = totals.get(name, 0.0) + value
    return totals


@pytest.mark.thorough
@only(3)
def test_what_is_kept_goes_on_in_another_layout(root, capsys: pytest.CaptureFixture[str]) -> None:
    """Into other stages, bucket sizes and compressions, and from and to a run without compression. Missing state is reported."""
    with session_of(tables(root, "run", TOP_K, 3, sharding={"stage": 0})) as session:
        train(session, StopRequest())
        saved = kept_in_all(session)
    assert len(saved) > 20 and any(saved.values())
    for stage, compression in ((2, TOP_K), (1, POWERSGD)):
        capsys.readouterr()
        sharding = {"stage": stage, "reduce_bucket_size": 9000}
        with session_of(tables(root, "run", compression, 3, sharding=sharding)) as session:
            assert session.progress.step == 3
            assert kept_in_all(session) == pytest.approx(saved, rel=1e-5, abs=1e-9)
        if dist.get_rank() == 0:
            assert ("of its tensors are not in" in capsys.readouterr().out) == (compression is POWERSGD)
    losses(tables(root, "run", {"name": "none"}, 4))
    with session_of(tables(root, "run", TOP_K, 5)) as session:
        assert session.progress.step == 4 and not any(kept_in_all(session).values())
    if dist.get_rank() == 0:
        assert "of its tensors are not in" in capsys.readouterr().out


@pytest.mark.thorough
@only(3)
def test_stage_3_sends_16_bits(root) -> None:
    curves = [losses(tables(root, name, {"name": name}, sharding={"stage": 3})) for name in ("none", "bf16", "fp16")]
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], rel=2e-3) and curve != curves[0]


@pytest.mark.thorough
@only(3)
def test_the_compression_of_the_documentation(root, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of the page must work: it trains, and resumes from its checkpoint exactly."""
    page = (Path(__file__).parent.parent.parent / "docs" / "plugins" / "compression.md").read_text()
    code = next(block for block in page.split("```python\n") if "class SignCompressor" in block).split("```")[0]
    if dist.get_rank() == 0:
        (root / "sign_of_the_docs.py").write_text(code)
    dist.barrier()
    monkeypatch.syspath_prepend(str(root))
    options = {"plugins": {"load": ["sign_of_the_docs"]}, "checkpoint": {"every_steps": 2}}
    sign = {"name": "sign"}
    straight = losses(tables(root, "straight", sign, **options))
    losses(tables(root, "halves", sign, 2, **options))
    assert losses(tables(root, "halves", sign, 4, **options)) == straight[2:]


@pytest.mark.cases(thorough=["pipeline-{'name': 'top-k', 'ratio': 0.05}"], rest="nightly")
@only(4)
@pytest.mark.parametrize(
    ("axis", "compression"), [("tensor", TOP_K), ("tensor", POWERSGD), ("pipeline", TOP_K)], ids=str
)
def test_with_other_axes(root, axis: str, compression: dict[str, Any]) -> None:
    """Parameters that both tensor ranks hold stay equal; the ranks of a pipeline have different parameters."""
    made = tables(root, axis, compression, 3, parallelism={axis: 2}) | {"batch": {"global_size": 24, "micro_size": 6}}
    with session_of(made) as session:
        train(session, StopRequest())
        mine = {p.name: p.tensor.detach().clone() for p in session.model.pieces if p.tensor.shape == p.shape}
    everyone: list[dict[str, Any]] = gather_values({name: tensor.tolist() for name, tensor in mine.items()})
    for one in everyone:
        assert all(values == mine[name].tolist() for name, values in one.items() if name in mine)
    assert any(name in everyone[dist.get_rank() ^ 1] for name in mine) or axis == "pipeline"
    resumed = {**made, "job": {**made["job"], "steps": 4}}
    assert len(train_here(resumed).rows) == 1
