"""Weights to and from other programs, by the job and the commands."""

from __future__ import annotations

import re
from argparse import Namespace
from collections import OrderedDict
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli
import tomli_w
import torch
from click.testing import CliRunner
from jobs import TINY
from torch.nn.functional import relu

import hpctrain
from hpctrain.base.errors import HpctrainError
from hpctrain.cli import cli

EXAMPLE = Path(__file__).parents[2] / "examples" / "llama"


@pytest.fixture(autouse=True)
def _in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def trained(**tables: dict[str, Any]) -> dict[str, Any]:
    return hpctrain.run({**TINY, "job": {**TINY["job"], "steps": 1}, **tables})


def test_a_job_says_where_its_weights_were_and_what_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    first = hpctrain.load(trained()["checkpoint"]).state_dict()
    state = {f"module.{name}": value for name, value in first.items() if "head" not in name}
    state["module.extra"] = torch.ones(3)
    torch.save({"epoch": 1, "model": state}, "w.pt")
    model = {**TINY["model"], "weights": "w.pt"}
    job = {"name": "tuned", "steps": 1, "output_dir": "tuned"}
    with pytest.raises(
        HpctrainError,
        match=r"the weights in w\.pt are of another model: head.weight isn't there.*weights_strict = false takes",
    ):
        trained(model=model, job=job)
    capsys.readouterr()
    second = trained(model={**model, "weights_strict": False}, job=job, optimizer={"name": "sgd", "lr": 1e-30})
    said = capsys.readouterr().out
    for sentence in (
        "weights      w.pt: the state dict is at 'model'\n",
        "weights      w.pt: all its names begin with 'module.', which is left out\n",
        "weights      w.pt: not in it or of another shape, so they keep their first values: head.weight\n",
        "weights      w.pt: of no use to the model: extra\n",
    ):
        assert sentence in said, said
    loaded = hpctrain.load(second["checkpoint"]).state_dict()
    assert all(torch.equal(value, first[name]) for name, value in loaded.items() if "head" not in name)
    assert not torch.equal(loaded["head.weight"], first["head.weight"])


class Registered(dict[str, Any]):
    """A configuration as some trainers save it: a dict with attributes."""

    level = 3


@pytest.mark.parametrize(
    ("around", "told"),
    [
        (lambda state: {"model": state, "epoch": 3, "args": Namespace(lr=0.1, out=Path("x"))}, "the state dict is at 'model'"),
        (lambda state: {"model": state, "ema": state, "best": np.float64(0.5), "rng": np.arange(3)}, "is at 'model'"),
        (lambda state: {"state_dict": state, "cfg": Registered(a=1), "at": datetime(2020, 1, 1), "act": relu}, "is at"),
        (lambda state: {"model": {**state, "x._extra_state": None}, "best": torch.tensor(0.5)}, "left out: x._extra_state"),
        (lambda state: {**state, "epoch": 3, "args": Namespace()}, "no tensors, and left out: epoch, args"),
        (lambda state: _with_versions(state), None),
    ],
)  # fmt: skip
def test_weights_load_from_what_trainers_save_them_beside(around: Any, told: str | None) -> None:
    state = {"w": torch.arange(6.0).view(2, 3), "b": torch.ones(2)}
    torch.save(around(state), "w.pt")
    done = CliRunner().invoke(cli, ["checkpoint", "import", "w.pt", "out"])
    assert done.exit_code == 0 and "wrote out: 2 tensors" in done.output, (done.output, done.exception)
    assert (told or "wrote out") in done.output
    assert CliRunner().invoke(cli, ["checkpoint", "export", "out", "--to", "torch", "back.pt"]).exit_code == 0
    back = torch.load("back.pt", weights_only=True)
    assert back.keys() == state.keys() and all(torch.equal(back[name], value) for name, value in state.items())


def test_check_says_of_weights_what_run_says() -> None:
    """Tied parameters may be there under all their names; frozen and adapted ones count as in a run."""
    model = {**TINY["model"], "tie_embeddings": True}
    state = hpctrain.load(trained(model=model)["checkpoint"]).state_dict()
    renamed = {name.replace("layers.0", "blocks.0"): value for name, value in state.items()}
    for name, content, strict, code in (
        ("same", {"module": state, "args": Namespace()}, True, 0), ("other", renamed, True, 5), ("some", renamed, False, 0),
    ):  # fmt: skip
        torch.save(content, f"{name}.pt")
        tables = {
            **TINY,
            "job": {"name": name, "steps": 1},
            "model": {**model, "weights": f"{name}.pt", "weights_strict": strict},
        }
        Path(f"{name}.toml").write_text(tomli_w.dumps(tables))
        done = [CliRunner().invoke(cli, [command, f"{name}.toml"]) for command in ("check", "run")]
        assert [getattr(one.exception, "exit_code", one.exit_code) for one in done] == [code, code], done
        assert not code or all("are of another model: layers.0" in str(one.exception) for one in done), done


def _with_versions(state: dict[str, torch.Tensor]) -> Any:
    ordered: Any = OrderedDict(state)
    ordered._metadata = {"": {"version": 2}}
    return ordered


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (torch.nn.Linear(2, 3), r"holds an object with classes of a program's \(torch.nn.modules.linear.Linear\)"),
        ({"student": {"w": torch.ones(2)}, "teacher": {"w": torch.ones(2)}, "args": Namespace()}, "'student', 'teacher'"),
        ({"epoch": 3, "args": Namespace()}, r"holds \['epoch', 'args'\], expected a state dict"),
    ],
)  # fmt: skip
def test_what_is_no_state_dict_is_refused_with_its_keys(content: Any, says: str) -> None:
    torch.save(content, "w.pt")
    done = CliRunner().invoke(cli, ["checkpoint", "import", "w.pt", "out"])
    assert re.search(says, str(done.exception)) and not Path("out").exists()


def test_import_says_where_the_state_dict_was() -> None:
    torch.save({"state_dict": {"w": torch.ones(2)}, "hyper": {"lr": 0.1}}, "w.ckpt")
    done = CliRunner().invoke(cli, ["checkpoint", "import", "w.ckpt", "out"])
    assert done.exit_code == 0 and done.output.startswith(
        "w.ckpt: the state dict is at 'state_dict'\nwrote out: 1 tensors"
    ), done.output


@pytest.mark.thorough
def test_from_pretrained_takes_what_export_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.syspath_prepend(str(EXAMPLE))
    tables = tomli.loads((EXAMPLE / "llama.toml").read_text())
    tables.pop("parallelism")
    tables["job"]["steps"] = 1
    tables["model"] |= {"hidden_size": 32, "layers": 2, "tied": True}
    result = hpctrain.run(
        {**tables, "batch": {"global_size": 2, "micro_size": 2}, "hook": [{"name": "ema", "decay": 0.5}]}
    )
    ids = torch.arange(20)[None] * 7 % 256
    logits = []
    for of in ([], ["--weights-of", "ema"]):
        out = f"pretrained{len(of)}"
        done = CliRunner().invoke(
            cli, ["checkpoint", "export", str(result["checkpoint"]), "--to", "huggingface", out, *of]
        )
        assert done.exit_code == 0 and f"wrote {out}: LlamaForCausalLM\n" in done.output, done.output
        module = hpctrain.load(result["checkpoint"], weights_of=of[1] if of else None)
        with torch.no_grad():
            logits.append(AutoModelForCausalLM.from_pretrained(out)(ids).logits)
            torch.testing.assert_close(logits[-1], module(ids).logits)
    assert not torch.equal(*logits)
    again = CliRunner().invoke(
        cli, ["checkpoint", "export", str(result["checkpoint"]), "--to", "huggingface", "pretrained0"]
    )
    assert "pretrained0 exists already" in again.output + str(again.exception)


def test_export_to_huggingface_needs_a_model_that_it_knows() -> None:
    model = {"name": "torch.nn:Linear", "in_features": 2, "out_features": 2, "loss": "torch.nn.functional:mse_loss"}
    points = [(torch.ones(2), torch.zeros(2))] * 8
    tables = {**TINY, "job": {**TINY["job"], "steps": 1}, "model": model, "dataset": {"name": points}}
    path = hpctrain.run(tables)["checkpoint"]
    done = CliRunner().invoke(cli, ["checkpoint", "export", str(path), "--to", "huggingface", "new"])
    assert "has no save_pretrained(); expected a model of transformers" in done.output + str(done.exception)
    assert not Path("new").exists()
