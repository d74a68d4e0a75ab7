"""Measures hpctrain on one GPU. One benchmark per call:

    python benchmarks/gpu.py train     a GPT of 1.02 billion parameters, bf16, compiled: tokens/s and MFU (see mfu.py)
    python benchmarks/gpu.py fp8       a wider one of 1.2 billion, in fp8 (torchao), compared with bf16
    python benchmarks/gpu.py stages    a GPT of 0.26 billion parameters in bf16, not compiled, under stages 0 to 3

`train` and `stages` are compared with a plain torch loop: autocast, fused AdamW, clipping, the loss compiled where the blocks are,
over the same batches, which are on the GPU from the start. hpctrain's step is the complete step of a run, with data, metrics and
console. The kinds take turns, a few steps each. A round's ratio is a kind's time divided by the first kind's. The rounds are cut
into three parts, and the best and the worst of the three medians are printed. The losses of all steps are compared, too.

`--tiny --device cpu` tries a benchmark without a GPU.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from mfu import mfu, peak_of
from torch import Tensor
from torch.nn.functional import cross_entropy

from hpctrain.base.devices import accelerator, device_name, is_accelerator
from hpctrain.base.errors import HpctrainError
from hpctrain.checking.check import CheckedJob, check
from hpctrain.contracts.identity import Identity
from hpctrain.contracts.model import Batch, MetaModel
from hpctrain.job.raw import RawJob
from hpctrain.model.build import build_on_meta
from hpctrain.ranks.meeting import World, meet, start_communication, take_device
from hpctrain.ranks.rank_channel import RankChannel
from hpctrain.ranks.signals import StopRequest
from hpctrain.registry.life_cycle import LifeCycle
from hpctrain.training.assembly import assemble
from hpctrain.training.feed import Feed
from hpctrain.training.loop import train_step
from hpctrain.training.progress import Progress
from hpctrain.training.start import Start
from hpctrain.training.step import Steps

SIZES: dict[str, dict[str, int]] = {
    "large": {"hidden_size": 2048, "layers": 16, "attention_heads": 16, "vocab_size": 50304, "max_seq_length": 2048},
    "wide": {"hidden_size": 4096, "layers": 4, "attention_heads": 32, "vocab_size": 50304, "max_seq_length": 2048},
    "middle": {"hidden_size": 1024, "layers": 12, "attention_heads": 16, "vocab_size": 50304, "max_seq_length": 1024},
    "tiny": {"hidden_size": 32, "layers": 2, "attention_heads": 2, "vocab_size": 64, "max_seq_length": 16},
}
PARTS, WARM_UP, STEPS = 3, 3, 4
"""The number of medians, of warm-up steps of each kind, and of steps in a round."""
PLAIN, CLIP, RATE, SEED = "plain torch", 1.0, 1e-4, 1234


class Bench:
    """The common part of all kinds of one benchmark."""

    def __init__(self, size: str, batch: int, rounds: int, device: str, directory: Path) -> None:
        self.model: dict[str, Any] = {"name": "gpt", **SIZES[size]}
        self.batch, self.rounds, self._directory = batch, rounds, directory
        self._communicator = "gloo" if device == "cpu" else "nccl"
        self._world: World = meet(Identity(), RankChannel(terminal=False))
        communicator = self._checked("start", {}).parts.communicator
        self.device = take_device(self._world, communicator)
        start_communication(self._world, communicator, 600)

    def _checked(self, name: str, changes: dict[str, Any]) -> CheckedJob:
        tables: dict[str, Any] = {
            "job": {
                "name": name, "steps": WARM_UP + self.rounds * STEPS, "seed": SEED,
                "output_dir": str(self._directory / name),
            },
            "model": self.model, "dataset": {"name": "synthetic", "samples": 1_000_000},
            "optimizer": {"name": "adamw", "lr": RATE, "clip_norm": CLIP},
            "batch": {"global_size": self.batch, "micro_size": self.batch}, "precision": {"mode": "bf16"},
            "communicator": {"name": self._communicator}, **changes,
        }  # fmt: skip
        return check(RawJob(tables, {}, "benchmark"), 1)

    @property
    def parameters(self) -> int:
        """The number of parameters of the model."""
        return sum(one.numel() for one in build_on_meta(self._checked("count", {}).parts.model).parameters())

    def job(self, name: str, **changes: dict[str, Any]) -> Callable[[], float]:
        """A step of hpctrain, which returns its loss."""
        checked = self._checked(name, changes)
        hooks = LifeCycle(checked.registry, self._world.identity, [])
        start = Start(self._world.identity, self._world.channel, lambda: checked.raw, "never")
        start.world, start.checked, start.device, start.hooks = self._world, checked, self.device, hooks
        session = assemble(start)
        steps = Steps(session, StopRequest())
        steps.begin()
        return lambda: train_step(steps)[1].figures.loss

    def plain(self, compiled: bool) -> Callable[[], float]:
        """A step of a loop written with torch alone, which returns its loss."""
        checked = self._checked("plain", {})
        assert isinstance(checked.parts.model, MetaModel)
        module = plain_module(checked.parts.model, self.device)
        loss_of = _mean_loss
        if compiled:
            for block in checked.parts.model.blocks(module):
                block.compile()
            loss_of = torch.compile(_mean_loss)
        optimizer = torch.optim.AdamW(module.parameters(), lr=RATE, fused=True)
        batches = iter(self._batches())

        def step() -> float:
            batch = next(batches)
            with torch.autocast(self.device.type, torch.bfloat16):
                loss = loss_of(module(batch["input_ids"]), batch["labels"])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()

        return step

    def _batches(self) -> list[Batch]:
        """The batches of all steps, the same as the jobs', on the device."""
        checked = self._checked("plain", {})
        feed = Feed(checked.job, checked.parts, rank=0, ranks=1, node="", device=self.device, split=lambda batch: batch)
        loader = feed.training_loader(Progress(feed.data.steps))
        batches = [micro.batch for micro in loader]
        loader.close()
        return batches

    def seconds(self, kinds: dict[str, Callable[[], float]]) -> tuple[Tensor, Tensor]:
        """The seconds of each round and kind, (rounds, kinds), and the losses of all steps, (kinds, steps)."""
        losses = [[step() for _ in range(WARM_UP)] for step in kinds.values()]
        seconds = torch.zeros(self.rounds, len(kinds), dtype=torch.float64)
        for number in range(self.rounds):
            for kind, step in enumerate(kinds.values()):
                begin = self._clock()
                losses[kind] += [step() for _ in range(STEPS)]
                seconds[number, kind] = self._clock() - begin
        return seconds, torch.tensor(losses, dtype=torch.float64)

    def _clock(self) -> float:
        """The time when the GPU has done all that it was given: a loss on the host comes before the optimizer's kernels."""
        if is_accelerator(self.device):
            torch.accelerator.synchronize()
        return time.perf_counter()


def _mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """logits: (batch, seq, vocabulary), labels: (batch, seq)."""
    return cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def plain_module(spec: MetaModel, device: torch.device) -> torch.nn.Module:
    """The model with hpctrain's initial values."""
    module = build_on_meta(spec).to_empty(device=device)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            spec.initialize(name, parameter, (0, len(parameter)), SEED)
    return module


def kinds_of(what: str, bench: Bench) -> dict[str, Callable[[], float]]:
    """The kinds of a benchmark. The others are compared with the first."""
    compiled: dict[str, Any] = {"compile": {"enabled": True}}
    if what == "train":
        return {PLAIN: bench.plain(compiled=True), "hpctrain": bench.job("bf16", **compiled)}
    if what == "fp8":
        return {
            "bf16": bench.job("bf16", **compiled),
            "fp8": bench.job("fp8", precision={"mode": "fp8"}, **compiled),
        }
    stages = {f"stage {stage}": bench.job(f"stage-{stage}", sharding={"stage": stage}) for stage in range(4)}
    return {PLAIN: bench.plain(compiled=False), **stages}


def report(what: str, bench: Bench, names: list[str], seconds: Tensor, losses: Tensor) -> list[str]:
    """The common facts, then a line for each kind."""
    peak = peak_of(bench.device, 8192 if is_accelerator(bench.device) else 256)
    tokens = bench.batch * bench.model["max_seq_length"] * STEPS
    lines = [
        f"{what}: {bench.parameters:,} parameters, {bench.batch} x {bench.model['max_seq_length']} tokens a step, on "
        f"{device_name(bench.device)} with torch {torch.__version__}",
        f"peak {peak.flops / 1e12:.1f} TFLOP/s ({peak.source})",
    ]
    for number, name in enumerate(names):
        ratios = [part.median().item() for part in (seconds[:, number] / seconds[:, 0]).chunk(PARTS)]
        speed = tokens / seconds[:, number].median().item()
        line = f"{name:12} {speed:>12,.0f} tokens/s  MFU {mfu(speed, bench.model, peak):.3f}"
        if number:
            apart = ((losses[number] - losses[0]) / losses[0]).abs().max().item()
            line += f"  {min(ratios):.3f} - {max(ratios):.3f} of {names[0]}'s time, losses within {apart:.1e}"
        lines.append(line)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "fp8", "stages"])
    parser.add_argument("--rounds", type=int, default=9, help=f"of {STEPS} steps of each kind")
    parser.add_argument("--batch", type=int, help="sequences per step, 12 for train and 8 else; fewer take less memory")
    parser.add_argument("--tiny", action="store_true", help="a model of a few thousand parameters")
    parser.add_argument("--device", default="gpu", choices=["gpu", "cpu"])
    arguments = parser.parse_args()
    if arguments.device == "gpu" and accelerator() is None:
        parser.error("there is no GPU that torch can use; --tiny --device cpu tries the benchmark without one")
    size = "tiny" if arguments.tiny else {"train": "large", "fp8": "wide", "stages": "middle"}[arguments.what]
    try:
        with tempfile.TemporaryDirectory() as directory, redirect_stdout(sys.stderr):
            batch = arguments.batch or (12 if arguments.what == "train" else 8)
            bench = Bench(size, batch, arguments.rounds, arguments.device, Path(directory))
            kinds = kinds_of(arguments.what, bench)
            seconds, losses = bench.seconds(kinds)
            lines = report(arguments.what, bench, list(kinds), seconds, losses)
    except HpctrainError as error:
        raise SystemExit(f"{arguments.what}: {error}") from None
    print("\n".join(lines))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
