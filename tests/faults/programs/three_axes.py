"""Pipeline 2 x fully_shard 2 x tensor 2 on 8 ranks against one process."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hpctrain.mpi

STEPS = 4


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)))


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


torch.set_num_threads(1)
torch.manual_seed(1)
x, y = torch.randn(16, 32), torch.randn(16, 32)
whole = model()
optimizer = torch.optim.SGD(whole.parameters(), 0.05)
alone = torch.zeros(STEPS)
for number in range(STEPS):
    optimizer.zero_grad()
    loss = loss_of(whole(x), y)
    loss.backward()
    optimizer.step()
    alone[number] = loss.detach()

dist.init_process_group(hpctrain.mpi.BACKEND, init_method="mpi://")
mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp_shard", "tp"))
pp, dp = mesh.get_local_rank("pp"), mesh.get_local_rank("dp_shard")
mine = nn.Sequential(*list(model())[2 * pp : 2 * pp + 2])
for block in mine:
    parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(block, mesh=mesh["dp_shard"])
fully_shard(mine, mesh=mesh["dp_shard"])
stage = PipelineStage(mine, pp, 2, torch.device("cpu"), group=mesh.get_group("pp"))
schedule = Schedule1F1B(stage, n_microbatches=2, loss_fn=loss_of)
optimizer = torch.optim.SGD(mine.parameters(), 0.05)
losses = torch.zeros(STEPS)
for number in range(STEPS):
    optimizer.zero_grad()
    parts: list[Tensor] = []
    if pp == 0:
        schedule.step(x.chunk(2)[dp])
    else:
        schedule.step(target=y.chunk(2)[dp], losses=parts)
        losses[number] = torch.stack(parts).mean()
    optimizer.step()
dist.all_reduce(losses, dist.ReduceOp.AVG, group=mesh.get_group("dp_shard"))
dist.broadcast(losses, dist.get_world_size() - 1)
if dist.get_rank() == 0:
    print(f"largest difference {(losses - alone).abs().max().item():.1e} of losses {alone.tolist()}")
dist.destroy_process_group()
