"""hpctrain_horovod.torch with tensors on an accelerator, where there is one: a GPU, or the simulated one (tests/on_ranks.py).

What the operations mean is tested on CPUs. Here the same ones on a device give the CPU's results, at once and in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import hpctrain_horovod.torch as hvd
import pytest
import torch
from torch import Tensor, nn

OPERATIONS: dict[str, Callable[[Tensor], object]] = {
    "allreduce": hvd.allreduce,
    "integers": lambda tensor: hvd.allreduce(tensor.int()),
    "adasum": lambda tensor: hvd.allreduce(tensor, op=hvd.Adasum),
    "grouped_allreduce": lambda tensor: hvd.grouped_allreduce([tensor, tensor[:1].contiguous()], op=hvd.Max),
    "compressed": lambda tensor: hvd.allreduce(tensor, compression=hvd.Compression.fp16),
    "allgather": lambda tensor: hvd.allgather(tensor[: hvd.rank() + 1]),
    "broadcast": lambda tensor: hvd.broadcast(tensor, hvd.size() - 1),
    "alltoall": lambda tensor: hvd.alltoall(tensor[: hvd.size()], torch.ones(hvd.size(), dtype=torch.int32)),
    "reducescatter": lambda tensor: hvd.reducescatter(tensor, op=hvd.Sum),
    "sparse": lambda tensor: hvd.sparse_allreduce_async(tensor.relu().to_sparse(1), "sparse", hvd.Sum)().to_dense(),
}


@pytest.fixture(autouse=True)
def accelerator(device: torch.device) -> Iterator[torch.device]:
    if device.type == "cpu":
        pytest.skip("the other files test the CPU")
    hvd.init()
    yield device
    hvd.shutdown()


def mine() -> Tensor:
    return torch.randint(-3, 4, (7, 3), generator=torch.Generator().manual_seed(hvd.rank())).float()


def on_host(found: object) -> object:
    """The same values, with the tensors on the CPU."""
    if isinstance(found, Tensor):
        return found.cpu()
    return [on_host(one) for one in found] if isinstance(found, list | tuple) else found


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_device_gives_what_the_cpu_gives(accelerator: torch.device, name: str) -> None:
    if name == "adasum" and hvd.size() & (hvd.size() - 1):
        pytest.skip("Adasum needs a power of two")
    if name == "sparse" and accelerator.type == "sim":
        pytest.skip("the simulated device has no sparse tensors")
    for _ in range(2):
        found = OPERATIONS[name](mine().to(accelerator))
        first = found[0] if isinstance(found, list | tuple) else found
        assert isinstance(first, Tensor) and first.device == accelerator
        torch.testing.assert_close(on_host(found), on_host(OPERATIONS[name](mine())), rtol=1e-6, atol=0)


def test_results_follow_what_the_program_computes_before_and_after(accelerator: torch.device) -> None:
    """Inputs come from work that is still running; results are computed with at once; memory is given back meanwhile."""
    weight = torch.full((512, 512), 1 / 512, device=accelerator)
    total = torch.zeros((), device=accelerator)
    for step in range(5):
        handles = []
        for place in range(20):
            value = torch.full((512, 512), float(step * place + hvd.rank()), device=accelerator)
            for _ in range(3):
                value = value @ weight  # the same value again
            handles.append(hvd.allreduce_async(value, op=hvd.Sum, name=f"value{place}"))
            del value
        total += sum(hvd.synchronize(handle).mean() for handle in reversed(handles))
    ranks = sum(range(hvd.size()))
    expected = sum(step * place * hvd.size() + ranks for step in range(5) for place in range(20))
    assert total.item() == pytest.approx(expected, rel=1e-5)


def test_polling_becomes_true(accelerator: torch.device) -> None:
    handle = hvd.allreduce_async(mine().to(accelerator), name="polled")
    while not hvd.poll(handle):
        pass
    torch.testing.assert_close(hvd.synchronize(handle).cpu(), hvd.allreduce(mine()))


@pytest.mark.ranks(2)
def test_a_rank_that_has_joined_sends_zeros(accelerator: torch.device) -> None:
    if hvd.rank():
        assert hvd.allreduce(torch.ones(5, device=accelerator), op=hvd.Sum).tolist() == [hvd.size() - 1.0] * 5
    hvd.join()


def test_training_is_that_of_the_cpu(accelerator: torch.device) -> None:
    def trained(device: torch.device) -> list[Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).to(device)
        torch.manual_seed(hvd.rank())
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters()
        )
        hvd.broadcast_parameters(model.state_dict(), 0)
        hvd.broadcast_optimizer_state(optimizer, 0)
        for _ in range(4):
            loss = model(torch.randn(4, 6).to(device)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return [one.detach().cpu() for one in model.parameters()]

    torch.testing.assert_close(trained(accelerator), trained(torch.device("cpu")), rtol=1e-4, atol=1e-6)


def test_another_init_opens_the_data_path_again(accelerator: torch.device) -> None:
    for _ in range(2):
        assert hvd.allreduce(torch.ones(3, device=accelerator), op=hvd.Sum).tolist() == [float(hvd.size())] * 3
        hvd.shutdown()
        hvd.init()
