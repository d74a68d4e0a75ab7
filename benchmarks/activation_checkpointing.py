"""Measures the cost and savings of activation checkpointing: the step of a 12-layer GPT on one rank, with and without it.

    python benchmarks/activation_checkpointing.py [--hidden 256] [--vocabulary 8192] [--rounds 9] [--kinds "full every=2" ...]

A kind is a mode, optionally with options. In every round each kind takes a step (forward, backward, AdamW). A round's ratio is
the kind's time divided by the time of "none". The activation memory is the memory alive between forward and backward: the
storages of all tensors that forward made, counted as they come and go. Both are measured on the same models in one run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import tomli
import torch
from live_bytes import LiveBytes

from hpctrain.checking.check import check
from hpctrain.contracts.model import MetaModel
from hpctrain.job.raw import RawJob
from hpctrain.model.parameters import named_tensors

LAYERS, SEQUENCE, BATCH = 12, 256, 2
KINDS = ["full", "full every=2", "full every=3", "selective", "selective keep=[]"]


def make(kind: str, hidden: int, vocabulary: int) -> tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], None]]:
    """The forward, which returns the loss, and the rest of the step: backward and update."""
    mode, _, options = kind.partition(" ")
    tables: dict[str, Any] = {
        "job": {"name": "deep", "steps": 1}, "dataset": {"name": "synthetic"},
        "model": {
            "name": "gpt", "hidden_size": hidden, "layers": LAYERS, "attention_heads": hidden // 64,
            "vocab_size": vocabulary, "max_seq_length": SEQUENCE,
        },
        "optimizer": {"name": "adamw", "lr": 1e-4}, "batch": {"global_size": BATCH, "micro_size": BATCH},
        "activation_checkpointing": {"mode": mode, **tomli.loads("\n".join(options.split()))},
    }  # fmt: skip
    parts = check(RawJob(tables, {}, "benchmark"), None).parts
    spec, module = parts.model, parts.model.build()
    assert isinstance(spec, MetaModel)
    with torch.no_grad():
        for name, tensor in named_tensors(module):
            spec.initialize(name, tensor, (0, len(tensor)), 1)
    parts.activation_checkpointing.apply(module, spec, None)
    optimizer = parts.optimizer.build([{"params": list(module.parameters())}])
    ids = torch.randint(vocabulary, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}

    def forward() -> torch.Tensor:
        loss = spec.loss(spec.forward(module, batch), batch)
        assert isinstance(loss, torch.Tensor)
        return loss / ids.numel()

    def backward(loss: torch.Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return forward, backward


def kept_bytes(forward: Callable[[], torch.Tensor], backward: Callable[[torch.Tensor], None]) -> int:
    with LiveBytes() as live:
        loss = forward()
        kept = live.bytes
    backward(loss)
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--kinds", nargs="+", default=KINDS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    kinds = ["none", *arguments.kinds]
    steps = [make(kind, arguments.hidden, arguments.vocabulary) for kind in kinds]
    kept = [kept_bytes(*step) for step in steps]  # also a warm-up
    seconds = torch.zeros(arguments.rounds, len(kinds), dtype=torch.float64)
    for number in range(arguments.rounds):
        for kind, (forward, backward) in enumerate(steps):
            begin = time.process_time()
            backward(forward())
            seconds[number, kind] = time.process_time() - begin
    ratios = seconds / seconds[:, :1]
    print(
        f"{LAYERS} layers, hidden {arguments.hidden}, {BATCH} x {SEQUENCE} tokens, {arguments.vocabulary} ids, 1 thread"
    )
    for number, kind in enumerate(kinds):
        low, middle, high = (ratios[:, number].quantile(q).item() for q in (0.25, 0.5, 0.75))
        print(
            f"{kind:20} time {middle:.2f} ({low:.2f} - {high:.2f})  activations {kept[number] / 1e6:6.1f} MB, "
            f"saved {1 - kept[number] / kept[0]:.0%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
