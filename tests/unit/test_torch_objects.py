"""What torch's object collectives take once hpctrain has set communication up."""

from __future__ import annotations

import os
import pickle
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import JobFile
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

import hpctrain
from hpctrain.base.errors import CheckpointError
from hpctrain.ranks.restricted_pickle import ObjectUnpickler


def load(value: Any) -> Any:
    return ObjectUnpickler(BytesIO(pickle.dumps(value))).load()


class _Runs:
    """Its pickle calls `what` where it arrives."""

    def __init__(self, what: Any, *arguments: Any) -> None:
        self._what = what, arguments

    def __reduce__(self) -> Any:
        return self._what


def test_members_of_enums_come_back_and_no_other_attributes() -> None:
    """Python 3.11.0 to 3.11.3 write a member with getattr."""
    assert load(_Runs(getattr, WriteItemType, "SHARD")) is WriteItemType.SHARD
    with pytest.raises(TypeError, match="could run code here; expected a member of an enum"):
        load(_Runs(getattr, torch.Size, "__class__"))


def test_records_of_torch_arrive() -> None:
    properties = metadata.TensorProperties(torch.bfloat16, layout=torch.strided, requires_grad=True)
    index = metadata.MetadataIndex("model/x", torch.Size([1, 2]))
    plan = SavePlan([WriteItem(index, WriteItemType.SHARD)], storage_data={"x": (1, 2.5, None)})
    assert load(plan) == plan and load(properties) == properties


def test_errors_arrive() -> None:
    assert repr(load(CheckpointError("full"))) == repr(CheckpointError("full"))
    assert repr(load(OSError(28, "full"))) == repr(OSError(28, "full"))


@pytest.mark.parametrize(
    "what",
    [
        _Runs(os.system, "touch ran"), _Runs(eval, "open('ran', 'w')"), _Runs(exec, "open('ran', 'w')"), _Runs(open, "ran", "w"),
        _Runs(getattr, "x", "upper"), _Runs(torch.load, "ran"), _Runs(Path.touch, Path("ran")), _Runs(__import__, "antigravity"),
        [{"x": (_Runs(os.mkdir, "ran"),)}], torch.nn.Linear, torch.ones(2),
    ],
)  # fmt: skip
def test_nothing_that_runs_code_arrives(what: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((TypeError, AttributeError), match="could run code here"):
        load(what)
    assert not list(tmp_path.iterdir())


def test_after_a_job_everything_arrives_again(job: JobFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(job.directory)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)  # a rank that no launcher has started gets no pickles
    seen = []
    monkeypatch.setattr(
        "hpctrain.training.rank.train", lambda *_: seen.append(distributed_c10d._unpickler) or {"exit_code": 0}
    )
    with suppress(Exception):  # what follows the training is of no interest here
        hpctrain.run(hpctrain.load_job("job.toml"))
    assert seen == [ObjectUnpickler] and distributed_c10d._unpickler is pickle.Unpickler
