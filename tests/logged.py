"""For the tests of loggers: a run of few steps, its rows, a logger without a run, and readers of what loggers write."""

from __future__ import annotations

import csv
import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jobs import TINY

import hpctrain
from hpctrain.registry.registry import build_registry


def train(steps: int, *loggers: dict[str, Any], **tables: dict[str, Any]) -> dict[str, Any]:
    """Train to `steps`, from the newest checkpoint if there is one."""
    job = json.loads(json.dumps(TINY)) | {"evaluation": {"every_steps": 2}, "logger": [*loggers], **tables}
    job["job"]["steps"] = steps
    job["checkpoint"] = {"every_steps": 2}
    return hpctrain.run(job)


def forget_checkpoint(step: int) -> None:
    """Remove a checkpoint, as if the run had crashed before it was complete."""
    shutil.rmtree(f"out/checkpoints/step-{step:08d}")


def rows(of: str, path: Path = Path("out/metrics.jsonl")) -> dict[int, dict[str, Any]]:
    """The rows of metrics.jsonl that have the key `of`, by step."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["step"]: row for row in found if of in row}


def logger(slot_name: str, **options: Any) -> Any:
    cls: Any = build_registry().find("logger", slot_name).cls
    return cls(cls.Options(**options))


def prepare(name: str = "tiny") -> Path:
    """A directory of a run in which nothing has trained, for a logger that is used without a run."""
    out = Path("out")
    out.mkdir()
    (out / "job.resolved.toml").write_text(f'[job]\nname = "{name}"\n')
    return out


def table(name: str, directory: Path = Path("out")) -> list[dict[str, str]]:
    with (directory / name).open(newline="") as file:
        return list(csv.DictReader(file))


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """TensorBoard's steps and values by name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(directory), size_guidance={"scalars": 0}).Reload()
    return {name: [(one.step, one.value) for one in found.Scalars(name)] for name in found.Tags()["scalars"]}


def histories(uri: str) -> tuple[Any, dict[str, dict[int, float]]]:
    """The only run, and the values of each of its metrics by step."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("hpctrain")
    assert experiment is not None
    [run] = client.search_runs([experiment.experiment_id])
    found = {key: client.get_metric_history(run.info.run_id, key) for key in run.data.metrics}
    assert all(len({one.step for one in ones}) == len(ones) for ones in found.values())
    return run, {key: {one.step: one.value for one in ones} for key, ones in found.items()}


def records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file: a log of LevelDB in blocks of 32 KiB, of protobuf messages. The library has no reader of it."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, message = path.read_bytes(), 7, b""
    assert content[:4] == b":W&B"
    while at + 7 <= len(content):
        if 2**15 - at % 2**15 < 7:
            at += 2**15 - at % 2**15
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        message += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = Record.FromString(message)
            message = b""
            yield record


def is_whole(path: Path) -> bool:
    """Whether the file has the record of its run's end, which is its last."""
    *_, last = records(path)
    return last.WhichOneof("record_type") == "exit"


def read_offline(path: Path) -> tuple[Any, list[dict[str, Any]]]:
    """The run's record, and its history."""
    found = list(records(path))
    [run] = [one.run for one in found if one.WhichOneof("record_type") == "run"]
    history = [
        {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in one.history.item}
        for one in found
        if one.WhichOneof("record_type") == "history"
    ]
    return run, history
