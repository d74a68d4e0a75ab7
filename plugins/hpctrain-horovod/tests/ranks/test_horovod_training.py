"""Training in Horovod's style, held against one process that trains on all ranks' samples."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import hpctrain_horovod.torch as hvd
import pytest
import torch
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("world")

SAMPLES = 12  # which 1, 2, 3 and 4 ranks divide


@pytest.fixture(scope="module", autouse=True)
def horovod() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    """All ranks' samples."""
    draw = torch.Generator().manual_seed(step)
    return (
        torch.randn(SAMPLES, 5, generator=draw, dtype=torch.float64),
        torch.randint(0, 3, (SAMPLES,), generator=draw),
    )


def mine(tensor: Tensor) -> Tensor:
    return tensor.chunk(hvd.size())[hvd.rank()]


def loss_of(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(inputs), labels)


def alone(optimizer: Any, steps: int, **options: Any) -> nn.Module:
    model = model_of()
    optimizer = optimizer(model.parameters(), **options)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, *batch(step)).backward()
        optimizer.step()
    return model


def same(found: nn.Module, expected: nn.Module, **bounds: float) -> None:
    for (name, one), other in zip(found.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, msg=lambda text, name=name: f"{name}: {text}", **bounds)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_predivide_factor": 4.0},
        {"num_groups": 2},
        {"groups": 3},
        {"num_groups": 50},
        {"op": hvd.Sum, "scaled": True},
        {"named": False},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("optimizer", "values"), [(torch.optim.SGD, {"lr": 0.3, "momentum": 0.9}), (torch.optim.AdamW, {"lr": 0.05})]
)
def test_the_step_is_that_of_one_process(options: dict[str, Any], optimizer: Any, values: dict[str, Any]) -> None:
    options = dict(options)
    scaled, named = options.pop("scaled", False), options.pop("named", True)
    model = model_of(hvd.rank())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    plain = optimizer(model.parameters(), **values)
    distributed = hvd.DistributedOptimizer(plain, model.named_parameters() if named else None, **options)
    assert isinstance(distributed, optimizer) and type(distributed).__name__ == optimizer.__name__
    for step in range(5):
        distributed.zero_grad()
        (loss_of(model, *map(mine, batch(step))) / (hvd.size() if scaled else 1)).backward()
        distributed.step()
    same(model, alone(optimizer, 5, **values))


def test_groups_of_parameters() -> None:
    model = model_of()
    parameters = list(model.parameters())
    groups = [[parameters[0], parameters[3]], parameters[4:]]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.3), model.named_parameters(), groups=groups)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, *map(mine, batch(step))).backward()
        optimizer.step()
    same(model, alone(torch.optim.SGD, 3, lr=0.3))


def test_passes_for_each_step() -> None:
    """The gradients of the passes are added, as torch adds them."""
    model = model_of()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), backward_passes_per_step=3
    )
    for step in range(2):
        optimizer.zero_grad()
        for place in range(3):
            loss_of(model, *map(mine, batch(3 * step + place))).backward()
        optimizer.step()
    expected = model_of()
    plain = torch.optim.SGD(expected.parameters(), lr=0.1)
    for step in range(2):
        plain.zero_grad()
        for place in range(3):
            loss_of(expected, *batch(3 * step + place)).backward()
        plain.step()
    same(model, expected)


def test_gradients_may_be_cleared_before_the_first_backward_pass() -> None:
    """There are none yet, as in Horovod since 0.21."""
    model = model_of()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer.zero_grad(set_to_none=False)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_other_libraries_read_of_an_optimizer() -> None:
    from hpctrain_horovod.torch import optimizer as module

    model = model_of()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), backward_passes_per_step=2)
    assert "horovod" in str(type(optimizer)) and isinstance(optimizer, module._DistributedOptimizer)
    assert optimizer._parameter_names == {parameter: name for name, parameter in model.named_parameters()}
    assert (optimizer.op, optimizer.process_set, optimizer._compression) == (
        hvd.Average, hvd.global_process_set, hvd.Compression.none
    )  # fmt: skip
    everyone = set(model.parameters()) if hvd.size() > 1 else set()
    assert optimizer._requires_update == everyone and not optimizer._handles
    for left in (1, 0) if hvd.size() > 1 else (2, 2):
        loss_of(model, *map(mine, batch(0))).backward()
        assert set(optimizer._allreduce_delay.values()) == {left}
    assert set(optimizer._handles) == everyone
    optimizer.step()
    assert set(optimizer._allreduce_delay.values()) == {2} and not optimizer._handles
    optimizer.set_backward_passes_per_step(1)
    assert optimizer.backward_passes_per_step == 1
    for op in (hvd.Average, hvd.Adasum) if hvd.size() in (1, 2, 4) else (hvd.Average,):
        wrapped = hvd.DistributedOptimizer(plain, model.named_parameters(), op=op)
        with pytest.raises(TypeError, match="wrap it once"):
            hvd.DistributedOptimizer(wrapped, model.named_parameters())


def test_clipping_between_synchronize_and_step() -> None:
    model = model_of()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    expected = model_of()
    plain = torch.optim.SGD(expected.parameters(), lr=1.0)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, *map(mine, batch(step))).backward()
        optimizer.synchronize()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        with optimizer.skip_synchronize():
            optimizer.step()
        plain.zero_grad()
        loss_of(expected, *batch(step)).backward()
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(expected.parameters(), 0.05))
        plain.step()
    same(model, expected)


@pytest.mark.ranks(2)
def test_ranks_that_use_other_parameters() -> None:
    """A parameter without a gradient on a rank counts as zeros there."""
    model = model_of()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    layers = model if hvd.rank() else model[:3]  # type: ignore[index]
    inputs = batch(0)[0]
    layers(inputs).sum().backward()
    optimizer.step()
    expected = model_of()
    for rank in range(hvd.size()):
        (expected if rank else expected[:3])(inputs).sum().div(hvd.size()).backward()  # type: ignore[index]
    torch.optim.SGD(expected.parameters(), lr=0.1).step()
    same(model, expected)


@pytest.mark.ranks(2)
def test_misuse_is_told_and_the_next_step_works() -> None:
    model = model_of()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    loss_of(model, *map(mine, batch(0))).backward()
    with pytest.raises(AssertionError, match="zero_grad"):
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    loss_of(model, *map(mine, batch(0))).backward()
    with pytest.raises(AssertionError, match="backward_passes_per_step"):
        loss_of(model, *map(mine, batch(0))).backward()
    optimizer.step()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # autograd has added to gradients that were being reduced
    optimizer.zero_grad()
    loss_of(model, *map(mine, batch(1))).backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()
    everyone = hvd.allgather(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).unsqueeze(0))
    assert (everyone == everyone[0]).all()


def test_wrong_options() -> None:
    model = model_of()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    named = list(model.named_parameters())
    for options, word in [
        ({"named_parameters": [*named, named[0]]}, "more than once"),
        ({"named_parameters": named[1:]}, "lacks"),
        ({"named_parameters": model.parameters()}, "pairs"),
        ({"named_parameters": named, "op": hvd.Sum, "gradient_predivide_factor": 2.0}, "predivide"),
    ]:
        with pytest.raises(ValueError, match=word):
            hvd.DistributedOptimizer(plain, **options)
    if hvd.size() > 1:
        for groups in ({"groups": [[named[0][1]], [named[0][1]]]}, {"groups": -1}, {"groups": [], "num_groups": 2}):
            with pytest.raises(ValueError, match="groups"):
                hvd.DistributedOptimizer(plain, named, **groups)
    with pytest.raises(ValueError, match="generator"):
        hvd.broadcast_parameters(model.named_parameters(), root_rank=0)
    with pytest.raises(ValueError, match="LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(model.parameters()), root_rank=0)


@pytest.mark.parametrize("options", [{}, {"sparse_as_dense": True}, {"num_groups": 1}], ids=str)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.SparseAdam])
@pytest.mark.parametrize("clears", ["before", "after", "with zeros", "a broadcast"])
def test_sparse_gradients(options: dict[str, Any], kind: Any, clears: str) -> None:
    """They stay sparse: SparseAdam takes no others. In the last step rank 0 has none."""

    def embedding() -> nn.Embedding:
        torch.manual_seed(1)
        return nn.Embedding(10, 4, sparse=True).double()

    words = torch.randint(0, 10, (3, SAMPLES), generator=torch.Generator().manual_seed(3))
    weights = torch.arange(1.0, SAMPLES + 1, dtype=torch.float64).unsqueeze(1)
    model, expected = embedding(), embedding()
    made = kind(list(model.parameters()), lr=0.1)
    optimizer = hvd.DistributedOptimizer(made, list(model.named_parameters()), **options)
    plain = kind(list(expected.parameters()), lr=0.1)
    if clears == "a broadcast":
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for step in range(3):
        parts = range(0 if step < 2 or hvd.size() == 1 else 1, hvd.size())
        if clears != "after":
            optimizer.zero_grad(set_to_none=clears != "with zeros")
        if hvd.rank() in parts:
            (model(mine(words[step])) * mine(weights)).mean().backward()
        optimizer.step()
        assert model.weight.grad is not None and (model.weight.grad.is_sparse or clears == "a broadcast")
        if clears == "after":
            optimizer.zero_grad()
        plain.zero_grad()
        pieces = list(zip(words[step].chunk(hvd.size()), weights.chunk(hvd.size()), strict=True))
        sum((expected(pieces[part][0]) * pieces[part][1]).mean() / hvd.size() for part in parts).backward()  # type: ignore[union-attr]
        plain.step()
    same(model, expected)


def test_compressed_gradients() -> None:
    model = model_of()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.3), model.named_parameters(), compression=hvd.Compression.fp16
    )
    loss_of(model, *map(mine, batch(0))).backward()
    optimizer.step()
    assert next(model.parameters()).grad.dtype == torch.float64  # type: ignore[union-attr]
    same(model, alone(torch.optim.SGD, 1, lr=0.3), rtol=0, atol=1e-3)


@pytest.mark.shown_on(2, 4)
def test_adasum_of_equal_updates_is_the_update() -> None:
    model = model_of()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.05), model.named_parameters(), op=hvd.Adasum
    )
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, *batch(step)).backward()
        optimizer.step()
    same(model, alone(torch.optim.AdamW, 3, lr=0.05))
    with pytest.raises(AssertionError, match="Adasum"), optimizer.skip_synchronize():
        optimizer.step()


def test_a_schedule_made_before_and_a_state_loaded_after() -> None:
    model, expected = model_of(), model_of()
    plain, other = (torch.optim.SGD(one.parameters(), lr=0.5, momentum=0.9) for one in (model, expected))
    schedule, its = (torch.optim.lr_scheduler.StepLR(one, 1, 0.5) for one in (plain, other))
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    saved: dict[str, Any] = {}
    for step in range(4):
        if step == 2:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer.load_state_dict(saved)
            schedule.optimizer = optimizer
        optimizer.zero_grad()
        loss_of(model, *map(mine, batch(step))).backward()
        optimizer.step()
        schedule.step()
        other.zero_grad()
        loss_of(expected, *batch(step)).backward()
        other.step()
        its.step()
    same(model, expected)


@pytest.mark.parametrize("wrapped", [False, True])
def test_broadcast_optimizer_state(wrapped: bool) -> None:
    """The root has trained, the others have not."""
    model = model_of(hvd.rank())
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01 * (hvd.rank() + 1), amsgrad=hvd.rank() == 0)
    if hvd.rank() == 0:
        loss_of(model, *batch(0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    if wrapped:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    before = copy.deepcopy(optimizer.state_dict())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    expected = hvd.broadcast_object(before)
    found = optimizer.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for number, state in expected["state"].items():
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(found["state"][number][key]), torch.as_tensor(value)), (number, key)
    loss_of(model, *batch(1)).backward()
    optimizer.step()
    everyone = hvd.allgather(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).unsqueeze(0))
    assert (everyone == everyone[0]).all()


def test_broadcast_parameters_of_any_kind() -> None:
    rank, root = hvd.rank(), hvd.size() - 1
    given = {
        "transposed": torch.full((2, 3), float(rank)).t(), "mask": torch.tensor([rank == root, rank != root]),
        "count": torch.tensor(rank), "empty": torch.zeros(0), "text": "stays",
    }  # fmt: skip
    hvd.broadcast_parameters(given, root_rank=root)
    assert given["transposed"].tolist() == [[root, root]] * 3 and given["mask"].tolist() == [True, False]
    assert given["count"].item() == root


@pytest.mark.parametrize("shape", [(5,), (5, 4), (5, 2, 3)], ids=str)
def test_sync_batch_norm(shape: tuple[int, ...]) -> None:
    """Uneven numbers of samples, over two steps and in evaluation."""
    rank, size = hvd.rank(), hvd.size()
    kind = {1: nn.BatchNorm1d, 2: nn.BatchNorm1d, 3: nn.BatchNorm2d}[len(shape)]
    ours, whole = hvd.SyncBatchNorm(shape[0]).double(), kind(shape[0]).double()
    counts = [r + 1 for r in range(size)]
    for step in range(2):
        draw = torch.Generator().manual_seed(step)
        everything = 3 * torch.randn(sum(counts) + 2, *shape, generator=draw, dtype=torch.float64) + 1
        by = torch.randn(everything.shape, generator=draw, dtype=torch.float64)
        everything = everything[: sum(counts)] if size > 1 else everything[:3]
        by = by[: len(everything)]
        parts = everything.split(counts) if size > 1 else [everything]
        part, expected = parts[rank].clone().requires_grad_(), everything.clone().requires_grad_()
        found, right = ours(part), whole(expected)
        mine_by = by.split(counts)[rank] if size > 1 else by
        (found * mine_by).sum().backward()
        (right * by).sum().backward()
        torch.testing.assert_close(found, right.split(counts)[rank] if size > 1 else right)
        grad = expected.grad.split(counts)[rank] if size > 1 else expected.grad  # type: ignore[union-attr]
        torch.testing.assert_close(part.grad, grad)
    torch.testing.assert_close(hvd.allreduce(ours.weight.grad, op=hvd.Sum), whole.weight.grad)  # type: ignore[arg-type]
    torch.testing.assert_close(hvd.allreduce(ours.bias.grad, op=hvd.Sum), whole.bias.grad)  # type: ignore[arg-type]
    torch.testing.assert_close(ours.running_mean, whole.running_mean)
    torch.testing.assert_close(ours.running_var, whole.running_var)
    torch.testing.assert_close(ours.eval()(everything), whole.eval()(everything))


def test_gradients_after_a_broadcast_before_the_first_step() -> None:
    """Scripts read them; frozen parameters have none, of whatever type they are."""
    model = model_of()
    model.frozen = nn.Parameter(torch.tensor([1, 2], dtype=torch.int32), requires_grad=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert model.frozen.grad is None
    assert all((one.grad == 0).all() for one in model.parameters() if one.requires_grad)  # type: ignore[union-attr]


def test_a_closure_is_reduced_before_the_update() -> None:
    model, expected = model_of(), model_of()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3), model.named_parameters())
    plain = torch.optim.SGD(expected.parameters(), lr=0.3)
    for step in range(3):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, *map(mine, batch(step)))
            loss.backward()
            return loss

        optimizer.step(closure)
        plain.zero_grad()
        loss_of(expected, *batch(step)).backward()
        plain.step()
    same(model, expected)


def test_parameters_that_are_added_later() -> None:
    model, expected = model_of(), model_of()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model[4].parameters(), lr=0.3))  # type: ignore[index]
    plain = torch.optim.SGD(expected[4].parameters(), lr=0.3)  # type: ignore[index]
    for step in range(3):
        if step == 1:
            for one, its in ((optimizer, model), (plain, expected)):
                one.add_param_group({"params": list(its[:4].parameters()), "lr": 0.1})  # type: ignore[index]
        for one, its, place in ((optimizer, model, mine), (plain, expected, lambda tensor: tensor)):
            its.zero_grad()
            loss_of(its, *map(place, batch(step))).backward()
            one.step()
    same(model, expected)


def test_groups_with_parameters_that_the_optimizer_lacks() -> None:
    model, expected = model_of(), model_of()
    trained, its = [list(one.parameters())[2:] for one in (model, expected)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(trained, lr=0.3), groups=[list(model.parameters())])
    plain = torch.optim.SGD(its, lr=0.3)
    for step in range(2):
        for one, whose, place in ((optimizer, model, mine), (plain, expected, lambda tensor: tensor)):
            whose.zero_grad()
            loss_of(whose, *map(place, batch(step))).backward()
            one.step()
    same(model, expected)


def test_another_optimizer_on_the_same_model() -> None:
    model = model_of()
    for _ in range(2):
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3), model.named_parameters())
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, *map(mine, batch(step))).backward()
            optimizer.step()
        del optimizer
    with pytest.raises(ValueError, match="Adasum"):
        hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1), op=hvd.Adasum, process_set=hvd.ProcessSet([0])
        )
