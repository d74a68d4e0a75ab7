"""Partitioned activations: each tensor-parallel rank keeps a part of equal activations. test_layouts.py has the curves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hpctrain_plugins.activation_checkpointing.offload import HostMemory, Kept
from hpctrain_plugins.activation_checkpointing.partition import Partition
from live_bytes import LiveBytes
from torch.autograd.graph import saved_tensors_hooks
from training import job, own_device, session_of

from hpctrain.api import UsageError

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.ranks(2)]

LAYERS, HIDDEN, SEQ, ROWS = 3, 64, 32, 4


def kept(root, table: dict[str, Any]) -> tuple[int, list[torch.Tensor]]:
    """Bytes kept from forward to backward on this rank, and its gradients."""
    tables = job(
        job={"output_dir": str(root)}, activation_checkpointing=table, parallelism={"tensor": 2},
        model={"layers": LAYERS, "hidden_size": HIDDEN, "max_seq_length": SEQ},
        batch={"global_size": ROWS * dist.get_world_size() // 2, "micro_size": ROWS},
    )  # fmt: skip
    with session_of(tables) as session:
        spec, [tensor], sharded = session.parts.model, session.model.axes, session.model.sharded
        loader = session.feed.training_loader(session.progress)
        batch = next(loader).batch
        loader.close()
        with tensor.context():
            with LiveBytes() as live:
                loss = spec.loss(spec.forward(session.model.module, batch), batch)
                found = live.bytes
            sharded.begin(last=True)
            loss.backward()
        sharded.synchronize()
        return found, [gradient.clone() for gradient in session.model.take_gradients()]


@pytest.mark.shown_on(2)
def test_each_rank_keeps_its_part_of_the_inputs(root) -> None:
    full, expected = kept(root, {"mode": "full"})
    partitioned, gradients = kept(root, {"mode": "full", "partition_activations": True})
    saved = LAYERS * ROWS * SEQ * HIDDEN * 4 / 2
    assert full - partitioned == pytest.approx(saved, rel=0.02), (full, partitioned)
    for one, other in zip(gradients, expected, strict=True):
        assert torch.equal(one, other)


def test_inputs_come_back_from_host_memory_in_any_order() -> None:
    """Two of one block, of which backward wants the first one first; and all of them a second time."""
    memory = HostMemory()
    given = [torch.full((33,), float(i), device=own_device()).requires_grad_() for i in range(6)]
    kept = [memory.keep(one) for one in given]
    for _ in range(2):
        for number in (4, 5, 2, 3, 0, 1):
            assert torch.equal(memory.bring(kept[number]), given[number])


@pytest.mark.parametrize("later", [0, 2])
def test_an_input_that_is_changed_while_it_leaves_is_refused(later: int) -> None:
    if own_device().type == "cpu":
        pytest.skip("nothing leaves a CPU")
    memory = HostMemory()
    given = [torch.ones(33, device=own_device()).requires_grad_() * 1 for _ in range(1 + later)]
    kept = memory.keep(given[0])
    with torch.no_grad():
        given[0] += 1
    with pytest.raises(UsageError, match="input was changed in place"):
        for one in given[1:]:
            memory.keep(one)
        memory.bring(kept)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("shape", [(5, 7), (1,), (0, 3), ()], ids=str)
def test_any_shape_comes_back(shape: tuple[int, ...], offload: bool) -> None:
    """Sizes that the ranks do not divide, and fewer elements than ranks; a tensor without gradient is not partitioned."""
    group = dist.group.WORLD
    assert group is not None
    partition = Partition(group, HostMemory() if offload else None)
    values = torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape).T.contiguous().T
    x = values.to(own_device()).requires_grad_()
    part = partition.pack(x)
    mine = part.values.values if isinstance(part.values, Kept) else part.values
    assert mine.numel() == -(-x.numel() // group.size())
    assert torch.equal(partition.unpack(part), x)
    assert partition.unpack(partition.pack(x.detach())).data_ptr() == x.data_ptr()
    with saved_tensors_hooks(partition.pack, partition.unpack):
        y = (x * x).sum()
    y.backward()
    assert torch.equal(x.grad, 2 * x.detach())
