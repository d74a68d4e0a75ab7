"""The ranks of a node encode a corpus once, and an error of the rank that does it reaches all."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hpctrain_plugins.dataset.encoding import Encoder
from on_ranks import World
from tokenizers import Tokenizer, models, pre_tokenizers
from training import job, session_of

from hpctrain.base.errors import UsageError
from hpctrain.data.opening import once_per_node
from hpctrain.ranks.json_collectives import gather_values

pytestmark = [pytest.mark.ranks(2), pytest.mark.shown_on(2)]


@pytest.fixture
def tables(world: World, root: Path) -> dict[str, Any]:
    """A job on 40 files of words, with a cache of its own."""
    if world.rank == 0:
        for number in range(40):
            Path(root, f"{number}.txt").write_text(" ".join(f"w{(number * i) % 50}" for i in range(200)))
        tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(50)} | {"?": 50}, unk_token="?"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.save(str(root / "tokenizer.json"))
    dist.barrier()
    text = {"name": "text", "files": [str(root / "*.txt")], "tokenizer": str(root / "tokenizer.json")}
    return job(job={"output_dir": str(root / "out")}, dataset={**text, "cache": str(root / "cache")})


@pytest.fixture
def encoded_texts(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """How many texts each rank has encoded so far."""
    count = 0
    real: Callable[..., Any] = Encoder.ids

    def counted(self: Encoder, texts: list[bytes]) -> Any:
        nonlocal count
        count += len(texts)
        return real(self, texts)

    monkeypatch.setattr(Encoder, "ids", counted)
    return lambda: gather_values(count)


def test_one_rank_encodes_and_later_starts_encode_nothing(
    world: World, root: Path, tables: dict[str, Any], encoded_texts: Callable[[], list[int]]
) -> None:
    tables["evaluation"] = {"every_steps": 100}  # both splits are opened
    fingerprints = set()
    for _ in range(2):
        with session_of(tables) as session:
            fingerprints.add(session.feed.data.fingerprint)
            assert session.feed.data.samples == (40 * 200 * 95 // 100 - 1) // 8
        assert encoded_texts() == [40] + [0] * (world.size - 1)
    assert len(fingerprints) == 1 and len(list((root / "cache" / "tokens").iterdir())) == 1


def test_an_error_of_the_rank_that_encodes_is_raised_on_all(world: World, root: Path, tables: dict[str, Any]) -> None:
    """Only rank 0 reads the text."""
    if world.rank == 0:
        (root / "tokenizer.json").write_text("{}")
    with pytest.raises(UsageError, match=r"tokenizer\.json is not a tokenizers file"), session_of(tables):
        pass


def test_each_node_works_once_with_the_cores_of_all_its_ranks(world: World) -> None:
    """As on two nodes: the last rank is on one of its own."""
    mine, cores = f"node {world.rank == world.size - 1}", sorted(os.sched_getaffinity(0))
    own = {cores[world.rank % len(cores)]}
    os.sched_setaffinity(0, own)
    try:
        once = partial(once_per_node, mine, {})
        work = lambda: [world.rank, sorted(os.sched_getaffinity(0))]  # noqa: E731
        found, again = once("work", work), once("work", lambda: "another")
        others = {cores[rank % len(cores)] for rank in range(world.size - 1)}
        assert os.sched_getaffinity(0) == own
    finally:
        os.sched_setaffinity(0, cores)
    assert found == again == ([world.rank, sorted(own)] if world.rank == world.size - 1 else [0, sorted(others)])


def test_work_may_take_longer_than_a_collective(world: World) -> None:
    """No collective waits for the work itself."""
    begin = time.monotonic()
    assert once_per_node("here", {}, "slow", lambda: time.sleep(1.5) or 3) == 3
    assert time.monotonic() - begin > 1.4


def test_an_exception_of_any_kind_on_one_node_is_raised_on_all(world: World) -> None:
    def fail() -> None:
        raise ZeroDivisionError("on purpose")

    with pytest.raises(RuntimeError, match="ZeroDivisionError: on purpose"):
        once_per_node(f"node {world.rank}", {}, "fails", fail if world.rank == world.size - 1 else lambda: 1)
    assert once_per_node("here", {}, "works", lambda: 7) == 7
