"""Faults that mutants found, each with the expected sentence."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from commands import directory, ending  # noqa: F401  (a fixture)
from jobs import TINY

pytestmark = pytest.mark.usefixtures("directory")

LOSS = "torch.nn.functional:cross_entropy"
OWN = {"model": {"name": "odd_callables:linear", "loss": LOSS}, "dataset": {"name": "odd_callables:Described"}}
BY_TOKENS = {"batch": {"tokens": 64, "micro_tokens": 16}}


def written(text: str = "", **changes: Any) -> None:
    """job.toml: `text`, and the tiny job with some tables replaced."""
    shutil.rmtree("out", ignore_errors=True)
    Path("job.toml").write_text(text + tomli_w.dumps(TINY | changes))


def said(code: int, *words: str, command: str = "check") -> str:
    """The output of the command, which must end with `code`, without a traceback, within a minute and 2 GB."""
    found, printed, fault = ending(60, command, "job.toml", *words)
    assert fault is None and found == code, (found, fault, printed)
    return printed


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (f"a = 1\nb = {'9' * 5000}\n", "job.toml: not a job file: found an integer of thousands of digits, expected one of 64"),
        (f"\na = 0x{'f' * 5000}\n", "job.toml:2: [a]: found an integer of 20000 bits, expected one of 64 bits"),
        ("a = 9223372036854775808\n", "job.toml:1: [a]: found an integer of 64 bits, expected one of 64 bits with its sign"),
        (f"a = {'{a = ' * 500}1{'}' * 500}\n", "job.toml: not a job file: tables or arrays are nested too deeply, expected"),
        (f"{'a.' * 300}a = 1\n", "job.toml: not a job file: tables or arrays are nested too"),
        (f"{'a.' * 2000}a = 1\n", "job.toml: not a job file: tables or arrays are nested too"),
        ('a = "\\u0000"\n', "job.toml:1: [a]: found a text with the character U+0000, expected one without"),
        ("a = 07:32:00\n", 'job.toml:1: [a]: found a date or time, which no key takes; expected a text: "07:32:00"'),
        ('extends = "loop.toml"\n', "job.toml:1: extends: there is no file loop.toml; a path is relative to"),
        ('extends = "self.toml"\n', "self.toml:1: extends goes in a circle"),
        (f'extends = "{"a" * 300}"\n', "job.toml:1: extends: there is no file aaaa"),
        ('extends = "directory"\n', "job.toml:1: extends: there is no file directory"),
        ('extends = "/dev/zero"\n', "job.toml:1: extends: there is no file /dev/zero"),
    ],
)  # fmt: skip
def test_files_beyond_limits(text: str, sentence: str) -> None:
    written(text)
    assert said(2).startswith(sentence)
    assert said(2, command="run").startswith(sentence)


def test_a_job_file_in_a_loop_of_links() -> None:
    Path("job.toml").unlink(missing_ok=True)
    Path("job.toml").symlink_to("job.toml")
    assert "job.toml: cannot be read as a job file: Too many levels of symbolic links" in said(2)
    Path("job.toml").unlink()


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (f"job.seed={'9' * 5000}", "--set job.seed: found an integer of thousands of digits"),
        ("job.seed=-9223372036854775809", "[job] seed: found an integer of 64 bits, expected one of 64 bits with its sign"),
        (f"{'a.' * 2000}a=1", "tables or arrays are nested too deeply"),
        (f"job.name={'[' * 3000}{']' * 3000}", "--set job.name: tables or arrays are nested too deeply"),
        ("model.hidden_size=4611686018427387904", "[model] gpt: it cannot be built with these sizes: Storage size calculation"),
        ("model.layers=1099511627776", "[model] layers: expected less than or equal to 1000"),
        ("dataset.samples=4611686018427387904", "[dataset] samples: expected less than or equal to 100000000"),
        ("dataset.workers=2147483648", "[dataset] workers: expected less than or equal to 1024"),
        ("job.epochs=1e308", "[job] epochs: expected less than or equal to 1000000000"),
        ("communicator.timeout_seconds=1e300", "[communicator] timeout_seconds: expected less than or equal to 100000000"),
        (f"sharding.reduce_bucket_size='{'9' * 400}GB'", "reduce_bucket_size: expected a size in bytes below 2**63"),
        (f"dataset={{name='text',files=['corpus/*'],tokenizer='{'a' * 300}'}}", "expected table.key=value"),
    ],
)  # fmt: skip
def test_numbers_beyond_limits(override: str, sentence: str) -> None:
    written(sharding={"stage": 1})
    assert sentence in said(2, "--set", override)


def test_a_tokenizer_of_a_name_too_long() -> None:
    written(dataset={"name": "text", "files": ["corpus/*.txt"], "tokenizer": "a" * 300})
    assert "[dataset] tokenizer: there is no file aaaa" in said(2)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"batch": {"tokens": 2**62, "micro_tokens": 16}}, "have 4000; expected at most 100 times that"),
        ({"job": {"name": "a", "epochs": 1e9}, **BY_TOKENS}, "are more than 500,000 steps, too many to count"),
    ],
)  # fmt: skip
def test_batches_by_tokens_that_nobody_counts(changes: dict[str, Any], sentence: str) -> None:
    written(**{**BY_TOKENS, **changes})
    assert sentence in said(2)


@pytest.mark.parametrize(
    ("fault", "code", "sentence"),
    [
        ("len", 4, "[dataset] name = 'odd_callables:Described': __len__() raised KeyError: 'no length'\n  File "),
        ("negative", 2, "'odd_callables:Described': __len__() raised ValueError: __len__() should return >= 0; check"),
        ("huge", 2, "__len__() raised OverflowError"),
        ("text", 2, "__len__() raised TypeError: 'str' object cannot be interpreted as an integer"),
        ("empty", 2, "[dataset] odd_callables:Described: it has no samples of the split 'train'"),
        ("getitem", 4, "'odd_callables:Described': __getitem__(0) raised OSError: no such sample\n  File "),
        ("lambda", 2, "the model 'odd_callables:linear' does not take its samples, such as this function: "),
        ("lengths", 4, "[dataset] name = 'odd_callables:Described': lengths() raised ValueError: no lengths\n  File "),
        ("words", 2, "lengths() raised ValueError: invalid literal for int()"),
        ("few", 2, "its lengths have shape (1,), the smallest is 1; expected 8 numbers of at least 1"),
        ("none", 2, "its lengths have shape (0,)"),
        ("zero", 2, "its lengths have shape (8,), the smallest is 0; expected 8"),
        ("fingerprint", 4, "[dataset] name = 'odd_callables:Described': fingerprint() raised TypeError: no fingerprint\n  File "),
    ],
)  # fmt: skip
def test_datasets_of_ones_own_that_fail(fault: str, code: int, sentence: str) -> None:
    written(**{**OWN, "dataset": {"name": "odd_callables:Described", "fault": fault}})
    for command in ("check", "run"):
        printed = said(code, command=command)
        assert sentence in printed and "odd_callables.py" in printed if code == 4 else sentence in printed
        assert "hpctrain/" not in printed.partition(" raised ")[2], "the user's frames only"


@pytest.mark.parametrize(
    ("model", "code", "sentence"),
    [
        (
            "odd_callables:raises",
            4,
            "[model] name = 'odd_callables:raises' raised RuntimeError: raised on purpose\n  File ",
        ),
        ("odd_callables:leaves", 4, "[model] name = 'odd_callables:leaves' raised SystemExit: 3\n  File "),
        ("odd_callables:none", 2, "[model] name = 'odd_callables:none' returned NoneType, expected a torch.nn.Module"),
        ("os:getcwd", 2, "[model] name = 'os:getcwd' returned str, expected a torch.nn.Module"),
        (
            "odd_callables:no_parameter",
            2,
            "[model] odd_callables:no_parameter: it has no parameter to train: expected one at least",
        ),
    ],
)
def test_models_of_ones_own_that_are_none(model: str, code: int, sentence: str) -> None:
    written(**{**OWN, "model": {"name": model, "loss": LOSS}})
    assert sentence in said(code)
    assert sentence in said(code, command="run")


def test_a_model_that_the_meta_device_can_not_have_is_built_with_values() -> None:
    written(**{**OWN, "model": {"name": "odd_callables:looks_at_values", "loss": LOSS}})
    assert ": ok, 4 steps, 8 training samples" in said(0)


@pytest.mark.parametrize(
    ("parallelism", "sentence"),
    [
        ({"pipeline": 2}, "[parallelism] pipeline: the model 'odd_callables:linear' does not say where it can be cut"),
        ({"tensor": {"size": 2, "plan": {"layer": "colwise"}}}, "[parallelism.tensor] plan: no module matches 'layer'"),
        ({"tensor": 2}, "the model 'odd_callables:linear' has no tensor_plan, and no attention or MLP was found in it"),
        ({"context": 2}, "does not say which of its inputs are sequences (ContextParallelModel)"),
    ],
)
def test_axes_on_modules_that_take_none(parallelism: dict[str, Any], sentence: str) -> None:
    written(**OWN, parallelism=parallelism)
    assert sentence in said(2)


def test_an_optimizer_that_refuses_its_options() -> None:
    written(optimizer={"name": "torch.optim:Adagrad", "lr": 0.1, "lr_decay": -1.0})
    assert "[optimizer] name = 'torch.optim:Adagrad' raised ValueError: Invalid lr_decay value: -1.0" in said(2)


def test_what_this_machine_lacks_is_a_note() -> None:
    """The job may be meant for another machine: check runs on login nodes."""
    written(precision={"mode": "fp8"})
    printed = said(0)
    assert (
        "note: hpctrain run would refuse this machine: [precision] mode = 'fp8': float8 needs an NVIDIA GPU" in printed
    )
    assert "[precision] mode = 'fp8': float8 needs" in said(3, command="run")


@pytest.mark.parametrize(
    ("content", "name", "code", "sentence"),
    [
        (b"", "w.safetensors", 5, "w.safetensors isn't a whole safetensors file"),
        (b"", "w.pt", 5, "w.pt isn't a file of tensors that torch.load accepts"),
        (b"\x93NUMPY" * 99, "w.bin", 5, "w.bin isn't a file of tensors that torch.load accepts"),
        (None, "w", 2, "w isn't a checkpoint of a known format"),
    ],
)
def test_weights_that_are_none_are_told_by_check_as_by_run(
    content: bytes | None, name: str, code: int, sentence: str
) -> None:
    Path(name).mkdir(exist_ok=True) if content is None else Path(name).write_bytes(content)
    written(model=TINY["model"] | {"weights": name})
    assert "[model] weights: " in (checked := said(code)) and sentence in checked
    assert sentence in said(code, command="run")
