"""hpctrain.own_loop on one rank: against plain torch loops, and what it refuses."""

from __future__ import annotations

import copy
import gc
import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import hpctrain
from hpctrain.base.errors import HpctrainError, TrainingError, UsageError
from hpctrain.own_loops.jobs import check_model, job_tables
from hpctrain.own_loops.loop import Loop
from hpctrain.registry.user_code.python_objects import given_objects

DATA = [(one, one.sum(0, keepdim=True).sin()) for one in torch.randn(64, 3, generator=torch.Generator().manual_seed(1))]


@pytest.fixture(autouse=True)
def _in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make_net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()


@contextmanager
def looping(steps: int = 5, data: bool = True, **tables: Any) -> Iterator[Loop]:
    job = {"job": {"name": "own", "steps": steps}, "precision": {"mode": "fp64"}}
    if data:
        tables = {"dataset": {"name": DATA}, "batch": {"global_size": 8, "micro_size": 4}, **tables}
    with hpctrain.own_loop(job, **tables) as loop:
        yield loop


def values(module: nn.Module) -> list[Tensor]:
    return [one.detach().clone() for one in module.parameters()]


def whole(loop: Loop, model: Any) -> list[Tensor]:
    """The parameters, whichever part this rank has."""
    return list(loop.get_state_dict(model).values())


def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("runs/own/metrics.jsonl").read_text().splitlines()]


def test_the_lines_of_the_page() -> None:
    """Lines that docs/own-loop.md shows beside its first example, in a loop that has what they name."""
    page = (Path(__file__).parents[2] / "docs" / "own-loop.md").read_text()
    several, opened, averaged, registered = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    with looping() as loop:
        names: dict[str, Any] = {
            "loop": loop,
            "torch": torch,
            "net_g": make_net(),
            "net_c": make_net(),
            "big": make_net(),
        }
        exec(several, names)
        names["counter"] = names["scheduler"] = torch.optim.lr_scheduler.ConstantLR(names["of_g"])
        exec(registered, names)
        for step in loop.steps():
            for inputs, targets in step:
                loop.backward(mse_loss(names["generator"](inputs), names["teacher"](targets.expand(-1, 3)).detach()))
                loop.backward(names["critic"](inputs).square().mean())
            names["model"] = names["generator"]
            exec(opened, names)
            exec(averaged, names)
            for optimizer in (names["of_g"], names["of_c"]):
                optimizer.step()
                optimizer.zero_grad()
    assert {"loss", "loss_critic"} <= rows()[-1].keys()


def test_groups_and_a_scheduler_of_torch() -> None:
    """The optimizer has the groups and options of the given one, and the program's scheduler sets its rates."""

    def optimizer_of(net: nn.Sequential) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            [{"params": net[0].parameters(), "lr": 0.1, "momentum": 0.9}, {"params": net[2].parameters()}], lr=0.02
        )

    def factor(step: int) -> float:
        return 1 / (step + 1)

    net, seen = make_net(), []
    expected = copy.deepcopy(net)
    with looping() as loop:
        model, optimizer = loop.setup(net, optimizer_of(net))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        for step in loop.steps():
            for x, y in step:
                seen.append((x, y))
                loop.backward(mse_loss(model(x), y))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        found = values(model)
    mine = optimizer_of(expected)
    schedule = torch.optim.lr_scheduler.LambdaLR(mine, factor)
    for step in range(5):
        for x, y in seen[2 * step : 2 * step + 2]:
            (mse_loss(expected(x), y) / 2).backward()
        mine.step()
        schedule.step()
        mine.zero_grad()
    torch.testing.assert_close(found, values(expected), rtol=1e-12, atol=1e-12)
    assert [row["lr"] for row in rows()] == pytest.approx([0.1 / (step + 1) for step in range(5)])


@pytest.mark.parametrize("fails", [False, True])
def test_objects_of_before_are_collected_again_once_the_loop_is_over(fails: bool) -> None:
    """In between they are no work for the collector, which would stop each rank in another step."""
    gc.unfreeze()  # a program that has frozen its own objects keeps them so
    frozen = []
    with pytest.raises(ZeroDivisionError) if fails else nullcontext(), looping(steps=12) as loop:
        net = make_net()
        model, optimizer = loop.setup(net, torch.optim.SGD(net.parameters()))
        for step in loop.steps():
            frozen.append(gc.get_freeze_count() > 1000)
            for x, y in step:
                loop.backward(mse_loss(model(x), y))
            optimizer.step()
            if fails and len(frozen) == 11:
                _ = 1 / 0
    assert gc.get_freeze_count() == 0 and frozen[:11] == [False] * 10 + [True]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gradients_add_up_until_zero_grad(stage: int) -> None:
    """Several backwards in a step, one of them after an update that has left its gradients."""

    def train(net: nn.Module, backward: Callable[[Tensor], None], optimizer: Any, x: Tensor, y: Tensor) -> None:
        backward(mse_loss(net(x), y))
        backward(net(x).square().mean() + net(2 * x).mean())  # two forwards
        optimizer.step()
        net.eval()(x)  # as an evaluation does that forgets no_grad
        backward(net(x).abs().mean())  # without zero_grad
        optimizer.step()
        net.zero_grad()
        backward(mse_loss(net(x), 2 * y))
        optimizer.zero_grad()  # dropped

    net, seen = make_net(), []
    expected = copy.deepcopy(net)
    net(torch.ones(1, 3, dtype=torch.float64)).sum().backward()  # before the loop: it counts for nothing
    tables = {"sharding": {"stage": stage}, "batch": {"global_size": 8, "micro_size": 8}}
    with looping(**tables) as loop:
        model, optimizer = loop.setup(net, torch.optim.Adam(net.parameters(), lr=0.01))
        for step in loop.steps():
            for x, y in step:
                seen.append((x, y))
                train(model, loop.backward, optimizer, x, y)
        found = whole(loop, model)
    mine = torch.optim.Adam(expected.parameters(), lr=0.01)
    for x, y in seen:
        train(expected, Tensor.backward, mine, x, y)
    torch.testing.assert_close(found, values(expected), rtol=1e-12, atol=1e-12)


def test_a_frozen_part_keeps_its_values_and_its_state() -> None:
    net = make_net()
    with looping(4) as loop:
        model, optimizer = loop.setup(net, torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5))
        for step in loop.steps():
            model[0].requires_grad_(step.number != 2)
            before = values(model[0])
            for x, y in step:
                loop.backward(mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            same = all(torch.equal(one, other) for one, other in zip(before, values(model[0]), strict=True))
            assert same == (step.number == 2)


def test_clipping_and_the_norm_before() -> None:
    net = make_net()
    with looping(3) as loop:
        model, optimizer = loop.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for step in loop.steps():
            before = values(model)
            for x, y in step:
                loop.backward(100 * mse_loss(model(x), y))
            norm = loop.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            moved = torch.cat([(one - other).flatten() for one, other in zip(before, values(model), strict=True)])
            assert norm > 1 and float(moved.norm()) == pytest.approx(0.1, rel=1e-6)
            assert step.number == loop.step + 1
    assert all(row["grad_norm"] > 1 for row in rows())


@pytest.mark.thorough
def test_a_resume_gives_everything_back() -> None:
    """Models, optimizers, a scheduler, an object with a tensor, and random numbers."""

    class Counter:
        def __init__(self) -> None:
            self.seen, self.total = 0, torch.zeros(3, dtype=torch.float64)

        def state_dict(self) -> dict[str, Any]:
            return {"seen": self.seen, "total": self.total}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.seen, self.total = state["seen"], state["total"]

    def train(steps: int, name: str) -> tuple[list[Tensor], Counter]:
        counter, first, second = Counter(), make_net(), make_net()
        job = {"job": {"name": name, "steps": steps}, "precision": {"mode": "fp64"}}
        tables = {"dataset": {"name": DATA}, "batch": {"global_size": 8, "micro_size": 4}}
        with hpctrain.own_loop(job, **tables) as loop:
            one, of_one = loop.setup(first, torch.optim.Adam(first.parameters(), lr=0.01), name="one")
            two, of_two = loop.setup(second, torch.optim.Adam(second.parameters(), lr=0.02), name="two")
            scheduler = torch.optim.lr_scheduler.ExponentialLR(of_two, 0.5)
            loop.register_for_checkpointing(counter=counter, scheduler=scheduler)
            for step in loop.steps():
                for x, y in step:
                    noise = torch.randn_like(x)
                    loop.backward(mse_loss(one(x + noise), y) + mse_loss(two(x), y))
                    counter.seen += 1
                    counter.total = counter.total + x.sum(0)
                of_one.step()
                if step.number % 2:
                    of_two.step()
                    scheduler.step()
                of_one.zero_grad()
                of_two.zero_grad()
            return [*values(one), *values(two)], counter

    expected, of_expected = train(6, "whole")
    train(3, "cut")
    found, counter = train(6, "cut")
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert counter.seen == of_expected.seen == 12 and torch.equal(counter.total, of_expected.total)
    whole, cut = (Path(f"runs/{name}/metrics.jsonl").read_text().splitlines() for name in ("whole", "cut"))
    for one, other in zip(map(json.loads, whole), map(json.loads, cut), strict=True):
        keys = [key for key in one if key.startswith(("loss", "lr", "grad_norm"))]
        assert [one[key] for key in keys] == [other[key] for key in keys]
        assert ("loss_two" in keys) == bool(one["step"] % 2)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_models_that_take_turns_in_each_micro_batch(stage: int) -> None:
    """Gradients that a micro batch has left, unsummed, are dropped between a forward and its backward."""

    def turns(
        one: nn.Module, two: nn.Module, of_one: Any, of_two: Any, backward: Callable[[Tensor], None], x: Tensor
    ) -> None:
        outputs = two(one(x).expand(-1, 3).detach())
        of_two.zero_grad()
        backward(outputs.square().mean())
        of_two.step()
        of_one.zero_grad()
        backward(two(one(x).expand(-1, 3)).mean())  # leaves gradients in the second model, too
        of_one.step()

    first, second = make_net(), make_net()
    whole_first, whole_second, seen = copy.deepcopy(first), copy.deepcopy(second), []
    with looping(4, sharding={"stage": stage}) as loop:
        one, of_one = loop.setup(first, torch.optim.SGD(first.parameters(), lr=0.1), name="one")
        two, of_two = loop.setup(second, torch.optim.SGD(second.parameters(), lr=0.1), name="two")
        for step in loop.steps():
            for x, _ in step:
                seen.append(x)
                turns(one, two, of_one, of_two, loop.backward, x)
        found = [*whole(loop, one), *whole(loop, two)]
    mine = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (whole_first, whole_second)]
    for x in seen:
        turns(whole_first, whole_second, *mine, lambda loss: (loss / 2).backward(), x)
    torch.testing.assert_close(found, [*values(whole_first), *values(whole_second)], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [None, "second"])
@pytest.mark.parametrize("stage", [0, 3])
def test_what_is_not_used_is_left_alone_also_after_a_resume(stage: int, name: str | None) -> None:
    """The head is used from the fourth step on, after a resume, as torch's AdamW has it: a decay and bias correction from there."""
    job = {"job": {"name": "own", "steps": 3}, "precision": {"mode": "fp64"}, "sharding": {"stage": stage}}
    x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def loss(net: Any, step: int) -> Tensor:
        return (net(x) if step > 3 else net(x, head=False)).square().mean()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body, self.head = (nn.Linear(3, 3, dtype=torch.float64) for _ in range(2))

        def forward(self, x: Tensor, head: bool = True) -> Tensor:
            return self.head(self.body(x).tanh()) if head else self.body(x)

    for steps in (3, 6):
        job["job"]["steps"] = steps
        with hpctrain.own_loop(job) as loop:
            if name:
                net = make_net()
                other, of_other = loop.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
            net = Net()
            model, optimizer = loop.setup(net, torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5), name=name)
            for step in loop.steps():
                loop.backward(loss(model, step.number))
                optimizer.step()
                optimizer.zero_grad()
                if name:
                    loop.backward(other(x).mean())
                    of_other.step()
                    of_other.zero_grad()
            found = whole(loop, model)
    expected = Net()
    mine = torch.optim.AdamW(expected.parameters(), lr=0.1, weight_decay=0.5)
    for number in range(1, 7):
        loss(expected, number).backward()
        mine.step()
        mine.zero_grad()
    torch.testing.assert_close(found, values(expected), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("leaving", ["exit", "never"])
def test_how_a_loop_may_end(leaving: str, caplog: pytest.LogCaptureFixture) -> None:
    """sys.exit() is a `break` after which the program ends; a loop that never steps has trained nothing."""
    net = make_net()
    kind, said = (SystemExit, None) if leaving == "exit" else (TrainingError, "no optimizer has stepped in 5 steps")
    with pytest.raises(kind, match=said), looping(5) as loop:
        model, optimizer = loop.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for step in loop.steps():
            for x, y in step:
                loop.backward(mse_loss(model(x), y))
            if leaving == "exit":
                optimizer.step()
                optimizer.zero_grad()
                if step.number == 3:
                    sys.exit()
    saved = [one.name for one in Path("runs/own/checkpoints").glob("step-*")]
    assert saved == (["step-00000003"] if leaving == "exit" else [])
    assert ("no optimizer has stepped" in caplog.text) == (leaving == "never")


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("keeps", [False, True])
def test_a_frozen_model_that_the_program_changes(stage: int, keeps: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A momentum teacher: registered, a resume goes on with it; if not, the first step says that it is lost."""

    def train(name: str, steps: int) -> list[float]:
        net = make_net()
        old = copy.deepcopy(net).requires_grad_(False)
        job = {"job": {"name": name, "steps": steps}, "precision": {"mode": "fp64"}, "sharding": {"stage": stage}}
        with hpctrain.own_loop(job) as loop:
            student, optimizer = loop.setup(net, torch.optim.SGD(net.parameters(), lr=0.1), name="student")
            teacher = loop.setup(old, name="teacher")
            if keeps:
                loop.register_for_checkpointing(teacher=teacher)
            for step in loop.steps():
                x = torch.full((4, 3), float(step.number), dtype=torch.float64)
                with torch.no_grad():
                    goal = teacher(x) + 1
                loop.backward(mse_loss(student(x), goal))
                optimizer.step()
                optimizer.zero_grad()
                with loop.parameters(student) as fast, loop.parameters(teacher) as slow:
                    for (_, one), (_, other) in zip(slow, fast, strict=True):
                        one.lerp_(other, 0.1)
        return [json.loads(line)["loss"] for line in Path(f"runs/{name}/metrics.jsonl").read_text().splitlines()]

    expected = train("whole", 6)
    train("cut", 3)
    assert (train("cut", 6) == expected) == keeps
    assert ("has changed the frozen model 'teacher'" in caplog.text) == (not keeps)


@pytest.mark.parametrize("wrap", ["block", "size"])
def test_a_frozen_model_is_freed_after_its_forward(wrap: str) -> None:
    """Under stage 3: its parameters are of one type in every step, and it is differentiated through, too."""
    net, old = make_net(), make_net().requires_grad_(False)
    more = {"min_parameters": 1} if wrap == "size" else {}
    with looping(2, data=False, sharding={"stage": 3, "wrap": wrap, **more}) as loop:
        model, _ = loop.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        teacher = loop.setup(old, name="teacher")
        kinds = [type(one) for one in [*model.parameters(), *teacher.parameters()]]
        x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
        teacher(x).sum().backward()
        assert x.grad is not None
        for one in (model, teacher):
            with torch.no_grad():
                one(x)
        assert [type(one) for one in [*model.parameters(), *teacher.parameters()]] == kinds


def test_a_table_of_the_job_on_top_of_a_file() -> None:
    Path("job.toml").write_text('[job]\nname = "own"\nsteps = 2\n')
    net = make_net()
    with hpctrain.own_loop("job.toml", job={"output_dir": "elsewhere"}) as loop:
        loop.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    assert Path("elsewhere/job.resolved.toml").exists()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_model_is_the_module_that_setup_got(stage: int) -> None:
    """Its class, its names, its methods, its items and the call of its forward."""
    net = make_net()
    names, keys = [name for name, _ in net.named_parameters()], list(net.state_dict())
    with looping(1, data=False, sharding={"stage": stage}) as loop:
        model, _ = loop.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        assert isinstance(model, nn.Sequential) and type(model[:2]).__mro__[0] is nn.Sequential
        assert [name for name, _ in model.named_parameters()] == names and list(model.state_dict()) == keys
        x = torch.ones(1, 3, dtype=torch.float64)
        assert torch.equal(model(x), model.forward(x))
        with pytest.raises(UsageError, match="copy the module before setup"):
            copy.deepcopy(model)


def test_a_break_ends_the_run_in_order() -> None:
    net = make_net()
    with looping(9) as loop:
        model, optimizer = loop.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for step in loop.steps():
            for x, y in step:
                loop.backward(mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if step.number == 3:
                break
    assert len(rows()) == 3 and [one.name for one in Path("runs/own/checkpoints").glob("step-*")] == ["step-00000003"]


@pytest.mark.parametrize(("every", "asynchronous"), [(0, False), (2, False), (2, True), (1, True)])
def test_a_break_before_the_update_leaves_the_step_out(every: int, asynchronous: bool) -> None:
    net = make_net()
    with looping(9, checkpoint={"every_steps": every, "asynchronous": asynchronous}) as loop:
        model, optimizer = loop.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for step in loop.steps():
            if step.number == 3:
                break
            for x, y in step:
                loop.backward(mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    names = sorted(one.name for one in Path("runs/own/checkpoints").glob("step-*"))
    assert len(rows()) == 2 and names == ["step-00000001", "step-00000002"][every != 1 :]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_that_the_program_asks_for_is_complete_at_the_next_step(asynchronous: bool) -> None:
    def train(steps: int, name: str, saved_at: int | None) -> list[str]:
        net, seen = make_net(), []
        job = {"job": {"name": name, "steps": steps}, "checkpoint": {"every_steps": 3, "asynchronous": asynchronous}}
        with hpctrain.own_loop(job, precision={"mode": "fp64"}) as loop:
            model, optimizer = loop.setup(net, torch.optim.Adam(net.parameters()))
            assert (loop.checkpoint, loop.data_rank, loop.data_size) == (None, 0, 1)
            for step in loop.steps():
                if loop.checkpoint is not None and step.number in (1, 3, 5):
                    assert loop.checkpoint.is_dir()
                    seen.append(f"{step.number} after {loop.checkpoint.name}")
                if step.number == saved_at:
                    loop.save()
                loop.backward(model(torch.full((4, 3), float(step.number), dtype=torch.float64)).mean())
                optimizer.step()
                optimizer.zero_grad()
                if step.number == 4 and steps == 5 and saved_at is not None:
                    break
        return seen

    assert train(5, "own", 2)[0] == "3 after step-00000002"
    names = {one.name for one in Path("runs/own/checkpoints").glob("step-*")}
    assert names == {"step-00000002", "step-00000003", "step-00000004"}
    assert train(6, "own", 5) == ["5 after step-00000004"]
    assert {one.name for one in Path("runs/own/checkpoints").glob("step-*")} - names == {
        "step-00000005",
        "step-00000006",
    }


def test_what_groups_are_set_to_before_the_steps_stays() -> None:
    net = make_net()
    with looping(3) as loop:
        model, optimizer = loop.setup(net, torch.optim.AdamW(net.parameters(), lr=0.1))
        optimizer.param_groups[0]["weight_decay"] = 0.25
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=4, cycle_momentum=False)
        for step in loop.steps():
            for x, y in step:
                loop.backward(mse_loss(model(x), y), divisor=2)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            assert optimizer.param_groups[0]["weight_decay"] == 0.25
    assert rows()[0]["lr"] < rows()[1]["lr"]


def test_validation_and_a_step_with_two_updates() -> None:
    class Splits:
        def __call__(self, split: str) -> Any:
            return DATA[:37] if split == "validation" else DATA

    net = make_net()
    tables = {"dataset": {"name": Splits()}, "evaluation": {"every_steps": 2}, "guard": {"non_finite": "skip"}}
    with looping(2, **tables) as loop:
        model, optimizer = loop.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for step in loop.steps():
            for x, y in step:
                loop.backward(mse_loss(model(x), y) * (math.nan if step.number == 2 else 1))
            optimizer.step()
            optimizer.zero_grad()
            loop.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                seen = [micro.batch[0] for micro in loop.validation() if micro.counts]
            assert sum(map(len, seen)) == 37
    assert [row.get("skipped", False) for row in rows()] == [False, True]


def trained(loop: Loop) -> Any:
    net = make_net()
    return loop.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))


def second_parameter(loop: Loop) -> None:
    net = make_net()
    loop.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    loop.setup(nn.Sequential(net, nn.Linear(1, 1)), None, name="other")


def used_optimizer(loop: Loop) -> None:
    net = make_net()
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    optimizer.step()
    loop.setup(net, optimizer)


def lacking_parameter(loop: Loop) -> None:
    net = make_net()
    loop.setup(net, torch.optim.SGD(net[0].parameters(), lr=0.1))


def strange_parameter(loop: Loop) -> None:
    loop.setup(make_net(), torch.optim.SGD(make_net().parameters(), lr=0.1))


def early_scheduler(loop: Loop) -> None:
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loop.setup(net, optimizer)


def no_rate(loop: Loop) -> None:
    net = make_net()
    loop.setup(net, torch.optim.SGD(net.parameters(), lr=0.0))


def other_axes(loop: Loop) -> None:
    loop.setup(make_net(), parallelism={"tensor": {"size": 1}})


def late_group(loop: Loop) -> None:
    _, optimizer = trained(loop)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def own_key(loop: Loop) -> None:
    model, optimizer = trained(loop)
    for step in loop.steps():
        for x, _ in step:
            loop.backward(model(x).mean())
        optimizer.step()
        loop.log(grad_norm=1.0)


def strange_state(loop: Loop) -> None:
    class Holder:
        def state_dict(self) -> dict[str, Any]:
            return {"what": object()}

        load_state_dict = state_dict

    model, optimizer = trained(loop)
    loop.register_for_checkpointing(holder=Holder())
    for step in loop.steps():
        for x, _ in step:
            loop.backward(model(x).mean())
        optimizer.step()


def deep_part(loop: Loop) -> None:
    net = nn.Sequential(make_net())
    model, _ = loop.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for step in loop.steps():
        for x, _ in step:
            model[0][0](x)


def optimizer_alone(loop: Loop) -> None:
    loop.setup(None, torch.optim.SGD(make_net().parameters(), 0.1))


def no_optimizer(loop: Loop) -> None:
    loop.setup(make_net())


def same_name(loop: Loop) -> None:
    trained(loop)
    trained(loop)


def late_setup(loop: Loop) -> None:
    trained(loop)
    for _ in loop.steps():
        loop.setup(make_net(), name="late")


def nothing_trained(loop: Loop) -> None:
    loop.setup(make_net().requires_grad_(False))
    next(iter(loop.steps()))


def a_part(loop: Loop) -> None:
    model, _ = trained(loop)
    for step in loop.steps():
        for x, _ in step:
            model[0](x)


def twice_through_one_forward(loop: Loop) -> None:
    model, _ = trained(loop)
    for step in loop.steps():
        for x, _ in step:
            outputs = model(x)
            loop.backward(outputs.mean(), retain_graph=True)
            loop.backward(outputs.sum())


def early_save(loop: Loop) -> None:
    trained(loop)
    loop.save()


def no_gradient(loop: Loop) -> None:
    model, _ = trained(loop)
    for step in loop.steps():
        for x, _ in step:
            loop.backward(model(x).mean().detach())


def not_a_scalar(loop: Loop) -> None:
    model, _ = trained(loop)
    for step in loop.steps():
        for x, _ in step:
            loop.backward(model(x))


def strange_module(loop: Loop) -> None:
    model, _ = trained(loop)
    forgotten = nn.Linear(1, 1).double()
    for step in loop.steps():
        for x, _ in step:
            loop.backward(forgotten(model(x)).mean())


def forward_before_step(loop: Loop) -> None:
    model, optimizer = trained(loop)
    for step in loop.steps():
        for x, _ in step:
            loop.backward(model(x).mean())
        model(x)
        optimizer.step()


def thawed_later(loop: Loop) -> None:
    net = make_net()
    net[0].requires_grad_(False)
    model, optimizer = loop.setup(net, torch.optim.SGD(net[2].parameters(), lr=0.1))
    for step in loop.steps():
        model[0].requires_grad_(step.number > 1)
        for x, _ in step:
            loop.backward(model(x).mean())
        optimizer.step()
        optimizer.zero_grad()


def step_without_backward(loop: Loop) -> None:
    _, optimizer = trained(loop)
    for _ in loop.steps():
        optimizer.step()


def changed_before_backward(loop: Loop) -> None:
    net = make_net()
    model, _ = loop.setup(net, torch.optim.SGD(net.parameters(), lr=0.1), sharding={"stage": 3})
    for step in loop.steps():
        for x, _ in step:
            outputs = model(x)
            with torch.no_grad():
                model[2].bias.zero_()
            loop.backward(outputs.mean())


def opened_before_backward(loop: Loop) -> None:
    model, _ = trained(loop)
    for step in loop.steps():
        for x, _ in step:
            model(x)
            with loop.parameters(model):
                pass


def penalty_by_itself(loop: Loop) -> None:
    model, _ = trained(loop)
    for step in loop.steps():
        for x, _ in step:
            loop.backward(model(x).mean())
        loop.backward(sum(one.square().sum() for one in model.parameters()))  # type: ignore[arg-type]


def pending_gradient(loop: Loop) -> None:
    net = make_net()
    model, _ = loop.setup(net, torch.optim.SGD(net.parameters(), lr=0.1), sharding={"stage": 2})
    for step in loop.steps():
        for x, _ in step:
            loop.backward(model(x).mean())
            model[2].bias.grad.mul_(2)


def dropped_too_early(loop: Loop) -> None:
    model, _ = trained(loop)
    for step in loop.steps():
        for x, _ in step:
            loop.backward(model(x).mean())
            model[2].bias.grad = None


def strange_names(loop: Loop) -> None:
    model, _ = trained(loop)
    with loop.parameters(model, names="1.*"):
        pass


def strange_method(loop: Loop) -> None:
    net = make_net()
    loop.setup(net, torch.optim.SGD(net.parameters(), lr=0.1), methods=["encode"])


def kept_trained(loop: Loop) -> None:
    model, _ = trained(loop)
    loop.register_for_checkpointing(mine=model)


def late_tensor(loop: Loop) -> None:
    class Average:
        value: Tensor | None = None

        def state_dict(self) -> dict[str, Any]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.value = state["value"]

    model, optimizer = trained(loop)
    average = Average()
    loop.register_for_checkpointing(average=average)
    for step in loop.steps():
        for x, _ in step:
            loop.backward(model(x).mean())
            average.value = x.mean()
        optimizer.step()


@pytest.mark.parametrize(
    ("wrong", "kind", "said"),
    [
        (
            changed_before_backward,
            TrainingError,
            r"2\.bias of the model 'model' was changed in place between a forward",
        ),
        (opened_before_backward, TrainingError, "a forward of the model 'model' has had no backward yet"),
        (
            penalty_by_itself,
            TrainingError,
            "has added to the gradient of 0.bias of the model 'model' without a forward",
        ),
        (
            pending_gradient,
            TrainingError,
            r"the gradient of 2\.bias in the model 'model' is summed in the backward of the",
        ),
        (
            dropped_too_early,
            TrainingError,
            r"has replaced the gradient of 2\.bias in the model 'model', which is summed",
        ),
        (strange_names, UsageError, "no parameter of 'model' matches"),
        (strange_method, UsageError, "methods: Sequential has no method 'encode'"),
        (kept_trained, UsageError, "'model' is trained: checkpoints have it already"),
        (late_tensor, TrainingError, r"'value' of 'average' has the shape \(\) now, and had None"),
        (second_parameter, UsageError, r"0\.0\.weight of 'other' is a parameter of 'model', too"),
        (used_optimizer, UsageError, "has taken steps already"),
        (lacking_parameter, UsageError, r"2\.weight of 'model' is trained, but not in the optimizer"),
        (strange_parameter, UsageError, "parameters that are not the model's"),
        (early_scheduler, UsageError, "a scheduler has been made over the optimizer of 'model'"),
        (no_rate, UsageError, "has the learning rate 0"),
        (other_axes, UsageError, r"\[parallelism\] is the same for all models"),
        (late_group, UsageError, "expected the optimizer to have all its groups"),
        (own_key, TrainingError, "'grad_norm' is a key of the row itself"),
        (strange_state, TrainingError, "the state 'holder' can't be saved: values.values.what is a builtins.object"),
        (deep_part, TrainingError, "calls Linear, a part of the model 'model'"),
        (optimizer_alone, UsageError, "setup: found an optimizer without a model"),
        (no_optimizer, UsageError, "has parameters to train and no optimizer"),
        (same_name, UsageError, "there is a model 'model' already"),
        (late_setup, UsageError, "steps have begun already"),
        (nothing_trained, UsageError, "no model is trained"),
        (a_part, TrainingError, "calls Linear, a part of the model 'model'"),
        (
            twice_through_one_forward,
            TrainingError,
            "come to a forward of the model 'model' whose gradients are summed already",
        ),
        (strange_module, TrainingError, r"parameters that were not set up, of the shape \(1, 1\), \(1,\)"),
        (forward_before_step, TrainingError, "a forward of the model 'model' has no backward"),
        (thawed_later, TrainingError, r"0\.weight of the model 'model' was frozen when it was set up"),
        (early_save, UsageError, "save: the loop has no step yet"),
        (no_gradient, TrainingError, "the loss has no gradient"),
        (not_a_scalar, TrainingError, r"found a loss of shape \(4, 1\)"),
        (step_without_backward, TrainingError, "steps without a gradient"),
    ],
)
def test_a_mistake_gets_a_sentence(wrong: Callable[[Loop], None], kind: type[HpctrainError], said: str) -> None:
    with pytest.raises(kind, match=said), looping() as loop:
        wrong(loop)


@pytest.mark.parametrize(
    ("data", "tables", "said"),
    [
        (False, {"schedule": {"unit": "epoch"}}, r"\[schedule\] unit: \"epoch\" needs \[job\] epochs"),
        (False, {"evaluation": {"every_epochs": 1}}, r"\[evaluation\] every_epochs: .* stands for the loop's own data"),
        (
            True,
            {"batch": {"global_size": 8, "micro_size": 4, "drop_last": False}},
            r"drop_last = false: loop.backward\(\) aver",
        ),
    ],
)
def test_what_a_loop_has_no_epochs_for(data: bool, tables: dict[str, Any], said: str) -> None:
    with pytest.raises(HpctrainError, match=said), looping(data=data, **tables) as loop:
        trained(loop)


def test_a_pipeline_is_refused() -> None:
    tables = job_tables({"job": {"name": "own", "steps": 2}, "parallelism": {"pipeline": {"size": 2}}}, {}, 2)
    net = make_net()
    with (
        pytest.raises(UsageError, match="an axis spreads the model's layers over ranks"),
        given_objects(tables) as plain,
    ):
        check_model(plain, 2, "model", net, torch.optim.SGD(net.parameters(), lr=0.1), {})
