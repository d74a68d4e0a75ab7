"""torch's own parallelism on this backend: after some steps the losses are those of one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

STEPS = 4
# Plain SGD shows a gradient that is wrong by a factor, which Adam would hide.
RATE = 0.05


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4)),
    )


def data(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size * 8, 16, generator=generator), torch.randn(size * 8, 16, generator=generator)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def train(module: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> list[Tensor]:
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(module(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def reference(size: int) -> Tensor:
    module = model()
    losses = torch.stack(train(module, torch.optim.SGD(module.parameters(), RATE), *data(size)))
    assert losses[-1] < losses[0]
    return losses


def averaged(losses: list[Tensor]) -> Tensor:
    result = torch.stack(losses)
    dist.all_reduce(result, dist.ReduceOp.AVG)
    return result


def close(losses: Tensor, size: int) -> None:
    torch.testing.assert_close(losses, reference(size), rtol=0, atol=2e-6)


@pytest.mark.parametrize("bucket", [0.001, 25.0], ids=["many-buckets", "one-bucket"])
def test_distributed_data_parallel(world, bucket):
    x, y = (part.chunk(world.size)[world.rank] for part in data(world.size))
    module = DistributedDataParallel(model(), bucket_cap_mb=bucket)
    close(averaged(train(module, torch.optim.SGD(module.parameters(), RATE), x, y)), world.size)


def test_distributed_data_parallel_with_compressed_gradients(world):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    x, y = (part.chunk(world.size)[world.rank] for part in data(world.size))
    module = DistributedDataParallel(model())
    module.register_comm_hook(None, fp16_compress_hook)
    losses = averaged(train(module, torch.optim.SGD(module.parameters(), RATE), x, y))
    torch.testing.assert_close(losses, reference(world.size), rtol=0, atol=1e-3)
    assert not torch.equal(losses, reference(world.size))


def test_distributed_data_parallel_with_power_sgd(world):
    """Its hook communicates inside the callbacks of earlier operations.

    In one bucket: with several, the ranks' callbacks and backward passes would race for the order of operations,
    on this backend as on gloo.
    """
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    x, y = (part.chunk(world.size)[world.rank] for part in data(world.size))
    module = DistributedDataParallel(model(), bucket_cap_mb=100)
    state = PowerSGDState(None, matrix_approximation_rank=16, start_powerSGD_iter=2)
    module.register_comm_hook(state, powerSGD_hook)
    losses = averaged(train(module, torch.optim.SGD(module.parameters(), RATE), x, y))
    torch.testing.assert_close(losses, reference(world.size), rtol=0, atol=1e-2)


def test_zero_redundancy_optimizer(world):
    x, y = (part.chunk(world.size)[world.rank] for part in data(world.size))
    module = DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=RATE)
    close(averaged(train(module, optimizer, x, y)), world.size)


def sharded(mesh, **options) -> nn.Module:
    module = model()
    for block in module:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(module, mesh=mesh, **options)


def test_fully_shard(world):
    x, y = (part.chunk(world.size)[world.rank] for part in data(world.size))
    module = sharded(init_device_mesh("cpu", (world.size,)))
    close(averaged(train(module, torch.optim.SGD(module.parameters(), RATE), x, y)), world.size)


def test_fully_shard_in_bf16(world):
    x, y = (part.chunk(world.size)[world.rank] for part in data(world.size))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    module = sharded(init_device_mesh("cpu", (world.size,)), mp_policy=policy)
    losses = averaged(train(module, torch.optim.SGD(module.parameters(), RATE), x, y))
    torch.testing.assert_close(losses.float(), reference(world.size), rtol=0, atol=2e-2)


@pytest.mark.ranks(4)
def test_hybrid_sharding(world):
    x, y = (part.chunk(world.size)[world.rank] for part in data(world.size))
    module = sharded(init_device_mesh("cpu", (2, world.size // 2), mesh_dim_names=("replicate", "shard")))
    close(averaged(train(module, torch.optim.SGD(module.parameters(), RATE), x, y)), world.size)


def test_tensor_parallel(world):
    if 64 % world.size:
        pytest.skip("the hidden width must be divisible by the ranks")
    mesh = init_device_mesh("cpu", (world.size,))
    module = model()
    for block in module:
        parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    losses = train(module, torch.optim.SGD(module.parameters(), RATE), *data(world.size))
    close(torch.stack(losses), world.size)


@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B], ids=["gpipe", "1f1b"])
@pytest.mark.ranks(2)
def test_pipeline(world, schedule):
    if 4 % world.size:
        pytest.skip("four blocks must be divisible by the ranks")
    blocks = 4 // world.size
    mine = nn.Sequential(*list(model())[world.rank * blocks : (world.rank + 1) * blocks])
    stage = PipelineStage(mine, world.rank, world.size, torch.device("cpu"))
    pipeline = schedule(stage, n_microbatches=4, loss_fn=loss_of)
    optimizer = torch.optim.SGD(mine.parameters(), RATE)
    x, y = data(world.size)
    last = world.size - 1
    losses = torch.zeros(STEPS)
    for number in range(STEPS):
        optimizer.zero_grad()
        parts: list[Tensor] = []
        if world.rank == 0:
            pipeline.step(x)
        else:
            pipeline.step(**({"target": y, "losses": parts} if world.rank == last else {}))
        optimizer.step()
        if world.rank == last:
            losses[number] = torch.stack(parts).mean()
    dist.broadcast(losses, last)
    close(losses, world.size)
