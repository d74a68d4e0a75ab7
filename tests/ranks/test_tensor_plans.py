"""Tensor parallelism of foreign modules: guessed and given plans, tied weights, refusals."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hpctrain_plugins.parallelism.tensor.blocks import plan_of_blocks
from hpctrain_plugins.parallelism.tensor.cut import Cut
from hpctrain_plugins.parallelism.tensor.hugging_face import hugging_face_plan
from hpctrain_plugins.parallelism.tensor.plan import plan_for
from hpctrain_plugins.parallelism.tensor.refusals import refuse_unfit
from modules import Transformer, built, foreign_steps
from test_stages import compare
from torch import nn
from torch.nn.functional import normalize, silu
from training import job, session_of, train_here

from hpctrain.base.errors import UsageError
from hpctrain.contracts.model import TensorParallelModel
from hpctrain.job.problems import JobError
from hpctrain.registry.user_code.model import UserModel

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.ranks(2)]

GIVEN = {
    "embedding": "rowwise", "attention.*_proj": "colwise", "attention.o_proj": "rowwise",
    "mlp.0": "colwise", "mlp.2": "rowwise", "head": "vocabulary",
}  # fmt: skip


def tables_of(root, stage: int = 0, tensor: Any = 2, **model: Any) -> dict[str, Any]:
    return {
        "job": {"name": "foreign", "steps": 5, "seed": 4, "output_dir": str(root)},
        "model": {"name": "modules:Transformer", "loss": "torch.nn.functional:cross_entropy", **model},
        "dataset": {"name": "modules:samples"}, "optimizer": {"name": "sgd", "lr": 0.5, "momentum": 0.9},
        "batch": {"global_size": 24, "micro_size": 3}, "precision": {"mode": "fp64"},
        "sharding": {"stage": stage}, "parallelism": {"tensor": tensor},
    }  # fmt: skip


@pytest.mark.cases(thorough=["guessed-2", "guessed-3"], rest="nightly")
@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.shown_on(2)) for stage in (0, 2)), 3])
@pytest.mark.parametrize("plan", [{}, GIVEN], ids=["guessed", "given"])
def test_a_foreign_transformer(root, plan: dict[str, str], stage: int) -> None:
    """The head is tied to the embedding: the given plan cuts both alike, the guessed plan cuts neither."""
    if dist.get_world_size() % 2:
        pytest.skip("needs an even number of ranks")
    tables = tables_of(root, stage, {"size": 2, **({"plan": plan} if plan else {})})
    torch.set_default_dtype(torch.float64)
    try:
        expected = foreign_steps(built(tables, Transformer), tables, torch.optim.SGD, lr=0.5, momentum=0.9)
    finally:
        torch.set_default_dtype(torch.float32)
    compare(train_here(tables).rows, expected, losses=1e-10, norms=1e-10)


FUSED = {"attention.qkv": {"style": "colwise", "parts": 3}, "attention.proj": "rowwise"}


def alone(tables: dict[str, Any]) -> list[Any]:
    """The losses and norms of one process."""
    model = {key: value for key, value in tables["model"].items() if key not in ("name", "loss")}
    options = {key: value for key, value in tables["optimizer"].items() if key != "name"}
    optimizer = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[tables["optimizer"]["name"]]
    torch.set_default_dtype(torch.float64)
    try:
        return foreign_steps(built(tables, lambda: Transformer(**model)), tables, optimizer, **options)
    finally:
        torch.set_default_dtype(torch.float32)


def held_rows(tables: dict[str, Any]) -> list[int]:
    """This rank's rows of the fused projection, according to its pieces."""
    with session_of(tables) as session:
        own = [piece for piece in session.model.pieces if piece.name == "attention.qkv.weight"]
        return sorted(row for p in own for row in range(p.offsets[0], p.offsets[0] + len(p.tensor)))


GUESSED: tuple[dict[str, Any], dict[str, Any]] = ({}, {"key_value_heads": 2, "mlp": "fused"})
sharded = pytest.mark.ranks(4)


@pytest.mark.cases(thorough=["given-0"], rest="nightly")
@pytest.mark.parametrize(
    ("plan", "model", "stage"),
    [
        (FUSED, {}, 0),
        pytest.param(*GUESSED, 1, marks=sharded),
        pytest.param(FUSED, {}, 2, marks=sharded),
        pytest.param(*GUESSED, 3, marks=sharded),
    ],
    ids=["given-0", "guessed, grouped-1", "given-2", "guessed, grouped-3"],
)
def test_a_fused_projection(root, plan: dict[str, Any], model: dict[str, Any], stage: int) -> None:
    """A rank has its heads' rows of q, k and v (fewer of k and v), or of gate and up. Checkpoints have the form of one
    process, and load in both directions."""
    if dist.get_world_size() % 2:
        pytest.skip("needs an even number of ranks")
    tensor = {"size": 2, **({"plan": plan} if plan else {})}
    tables = tables_of(root, stage, tensor, attention="fused", **model)
    tables["optimizer"] = {"name": "adamw", "lr": 0.05} if stage == 3 else {**tables["optimizer"], "lr": 0.1}
    expected = alone({**tables, "job": {**tables["job"], "steps": 7}})
    if stage == 0:
        half = dist.get_rank() % 2
        assert held_rows(tables) == [part + 4 * half + i for part in (0, 8, 16) for i in range(4)]
    curve = train_here(tables).rows
    tables["job"]["steps"] = 6
    curve += train_here({**tables, "parallelism": {}}).rows  # not cut
    tables["job"]["steps"] = 7
    curve += train_here(tables).rows
    compare(curve, expected, losses=1e-10, norms=1e-10)


@pytest.mark.cases(thorough=["guessed"], rest="nightly")
@pytest.mark.parametrize(
    ("model", "stage"),
    [({}, 0), ({"planned": True}, 0), pytest.param({"planned": True}, 3, marks=sharded)],
    ids=["guessed", "hugging face", "hugging face, 3"],
)
def test_norms_of_each_head(root, model: dict[str, Any], stage: int) -> None:
    """Every rank has the full norm and normalizes some of the heads: gradients are summed over the ranks."""
    if dist.get_world_size() % 2:
        pytest.skip("needs an even number of ranks")
    tables = tables_of(root, stage, attention="normed", **model)
    compare(train_here(tables).rows, alone(tables), losses=1e-10, norms=1e-10)


@pytest.mark.cases(thorough=["3"])
@pytest.mark.parametrize("stage", [0, pytest.param(3, marks=sharded)])
def test_a_plan_that_forgets_them_is_refused_in_the_first_step(root, stage: int) -> None:
    """The loss of that step would be right, but the ranks would diverge from there on."""
    if dist.get_world_size() % 2:
        pytest.skip("needs an even number of ranks")
    sentence = r"the gradients of attention\.q_norm\.weight, attention\.q_norm\.bias, attention\.k_norm\.weight.* \"head_norm\""
    with pytest.raises(UsageError, match=sentence):
        train_here(tables_of(root, stage, {"size": 2, "plan": GIVEN}, attention="normed"))


def test_experts_stay_whole(caplog) -> None:
    module = nn.Module()
    module._tp_plan = {  # type: ignore[assignment]
        "layers.*.q_proj": "colwise", "layers.*.o_proj": "rowwise", "layers.*.mlp.experts": "moe_tp_experts",
        "layers.*.mlp.experts.gate_up_proj": "packed_colwise", "layers.*.mlp.experts.down_proj": "rowwise",
    }  # fmt: skip
    assert hugging_face_plan(module) == {"layers.*.q_proj": "colwise", "layers.*.o_proj": "rowwise"}
    assert "layers.*.mlp.experts: experts are not cut" in caplog.text


@pytest.mark.cases(nightly=["by-head"])
@pytest.mark.parametrize("attention", ["by-head", "all-heads"])
@pytest.mark.shown_on(2)
def test_an_attention_that_cannot_be_cut_as_guessed_is_left_whole(root, caplog, attention: str) -> None:
    tables = tables_of(root, attention=attention)
    assert held_rows(tables) == list(range(24))
    assert "is left whole on every rank: with qkv cut in parts of 8, 8, 8 rows, " in caplog.text
    compare(train_here(tables).rows, alone(tables), losses=1e-10, norms=1e-10)


class Between(nn.Module):
    """fc1, something between, fc2, and a residual."""

    def __init__(self, between: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.between, self.fc1, self.fc2 = between, nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc2(self.between(self.fc1(x)))


class Masked(Between):
    """Needs more inputs than a trial can give."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * mask


def test_a_guess_that_does_not_add_up_is_left_whole(caplog) -> None:
    """The code between two Linears may need all features, of which a rank has a part."""
    whole = nn.ModuleList(
        [nn.Sequential(nn.Linear(8, 12), nn.Softmax(-1), nn.Linear(12, 8)), Between(partial(normalize, dim=-1))]
    )
    assert plan_of_blocks(whole, 2) == {}
    assert (
        "a Sequential is left whole on every rank: with 0 cut in parts of 12 rows, the parts of the ranks"
        in caplog.text
    )
    cut = nn.ModuleList([nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)), Between(silu)])
    assert plan_of_blocks(cut, 2).keys() == {"0.0", "0.2", "1.fc1", "1.fc2"}
    assert plan_of_blocks(Masked(silu), 2).keys() == {"fc1", "fc2"}, "its names are all there is to go by"


class Sharing(nn.Module):
    """Two MLPs with a common input projection."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 8), nn.Linear(8, 7)
        self.one, self.two = Between(silu), Between(silu)
        self.two.fc1 = self.one.fc1

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.two(self.one(self.embedding(ids).mean(1))))  # type: ignore[no-any-return]


@pytest.mark.shown_on(2)
def test_a_linear_that_stands_in_two_places_is_cut_once(root) -> None:
    tables = tables_of(root)
    tables["model"]["name"] = "test_tensor_plans:Sharing"
    tables |= {"job": {**tables["job"], "steps": 2}, "precision": {"mode": "fp32"}}
    expected = foreign_steps(built(tables, Sharing), tables, torch.optim.SGD, lr=0.5, momentum=0.9)
    compare(train_here(tables).rows, expected, losses=2e-6, norms=1e-5)


def test_a_linear_with_parameters_in_modules_of_its_own_is_not_cut() -> None:
    """The styles cut only parameters of the Linear itself: of a parametrized Linear, only the bias."""
    module: Any = Between(silu)
    module.fc1 = nn.utils.parametrizations.weight_norm(module.fc1)
    plan = plan_for(module, SimpleNamespace(name="own"), {"fc1": Cut(style="colwise"), "fc2": Cut(style="rowwise")}, 2)  # type: ignore[arg-type]
    with pytest.raises(
        UsageError, match=r"fc1 is a ParametrizedLinear that contains fc1\.parametrizations, and colwise cuts a"
    ):
        refuse_unfit(module, SimpleNamespace(name="own"), plan, 2)  # type: ignore[arg-type]


class Planned(UserModel, TensorParallelModel):
    """A model of the user's own that brings a plan, its options."""

    def tensor_plan(self) -> Any:
        return self.options


def test_a_model_brings_the_plan_of_a_fused_projection() -> None:
    module, loss = Transformer(attention="fused"), torch.nn.functional.cross_entropy
    spec = Planned("own", Transformer, loss, FUSED)
    assert plan_for(module, spec, {}, 2)["attention.qkv"].parts == 3
    spec = Planned("own", Transformer, loss, {"attention.qkv": {"style": "colwise", "part": 3}})
    with pytest.raises(UsageError, match=r"tensor_plan of the model 'own': attention.qkv.part: Extra inputs"):
        plan_for(module, spec, {}, 2)


@pytest.mark.shown_on(2)
def test_a_fused_projection_by_head_is_cut_by_a_plan(root) -> None:
    plan = {**FUSED, "attention.qkv": {"style": "colwise", "parts": 1}}
    tables = tables_of(root, 0, {"size": 2, "plan": plan}, attention="by-head")
    assert len(held_rows(tables)) == 12
    compare(train_here(tables).rows, alone(tables), losses=1e-10, norms=1e-10)


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ("colwise", "attention.qkv is by its name several matrices in one"),
        ({"style": "colwise", "parts": [8, 8]}, "has 24 rows, and parts = [8, 8] are 16; expected the rows of each"),
        ({"style": "colwise", "parts": 5}, "has 24 rows, which parts = 5 do not divide"),
        ({"style": "colwise", "parts": [8, 9, 7]}, "in parts of 8, 9, 7, which 2 ranks do not divide"),
        ({"style": "rowwise", "parts": 3}, 'parts go with style = "colwise"'),
        ({"style": "colwise", "parts": 0}, "expected parts of at least 1"),
        ({"style": "colwise", "part": 3}, "unknown key 'part'"),
    ],
    ids=str,
)
@pytest.mark.shown_on(2)
def test_a_wrong_fused_entry_is_a_sentence(root, entry: Any, sentence: str) -> None:
    plan = {**FUSED, "attention.qkv": entry}
    with (
        pytest.raises((UsageError, JobError)) as error,
        session_of(tables_of(root, 0, {"size": 2, "plan": plan}, attention="fused")),
    ):
        pass
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        ({"mlp": "colwise"}, "mlp is a Sequential, and colwise cuts a Linear or an Embedding; leave it out"),
        ({"mlp.9": "colwise"}, "no module matches 'mlp.9'; the names are like embedding, attention"),
        ({"mlp.0": "colwize"}, "found the style 'colwize' for 'mlp.0', expected one of colwise, rowwise"),
        (
            {**GIVEN, "head": "colwise"},
            "with head as colwise each rank has a part of its outputs, and no rowwise Linear",
        ),
        ({"mlp.2": "rowwise"}, "mlp.2 as rowwise takes a part of its inputs, and no colwise module comes before it"),
        (
            {"head": "colwise_rep"},
            "embedding.weight and head.weight are one tensor, and the plan cuts them differently",
        ),
    ],
)
def test_a_wrong_plan_is_a_sentence(root, plan: dict[str, str], sentence: str) -> None:
    if dist.get_world_size() % 2:
        pytest.skip("needs an even number of ranks")
    with pytest.raises(UsageError) as error, session_of(tables_of(root, 0, {"size": 2, "plan": plan})):
        pass
    assert sentence in str(error.value)


def test_a_plan_that_fails_in_the_first_micro_batch_is_a_sentence(root) -> None:
    """No module cuts the sequence, so the MLP's part of it meets the full sequence."""
    if dist.get_world_size() > 2:
        pytest.skip("2 ranks have shown it")
    plan = {"layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise"}
    tensor = {"size": 2, "sequence_parallel": True, "plan": plan}
    tables = job(job={"output_dir": str(root)}, parallelism={"tensor": tensor})
    sentence = (
        r"first micro batch failed .* layers.\*.mlp.down as rowwise, sequence_parallel = true\): .* size of tensor"
    )
    with pytest.raises(UsageError, match=sentence) as error:
        train_here(tables)
    assert isinstance(error.value.__cause__, RuntimeError)


@pytest.mark.shown_on(2)
def test_what_is_frozen_stays_so_under_sequence_parallelism(root) -> None:
    model = {"tie_embeddings": True, "freeze": ["*norm*", "token_embedding.*"]}
    tables = job(
        job={"output_dir": str(root)}, model=model, parallelism={"tensor": {"size": 2, "sequence_parallel": True}}
    )
    with session_of(tables) as session:
        trained = {piece.name for piece in session.model.pieces}
    assert trained and not any("norm" in name or name.startswith("token_embedding") for name in trained)


def test_heads_that_do_not_divide(root) -> None:
    if dist.get_world_size() % 2:
        pytest.skip("needs an even number of ranks")
    with (
        pytest.raises(UsageError, match="num_heads is 1, which 2 ranks do not divide"),
        session_of(tables_of(root, heads=1)),
    ):
        pass


@pytest.mark.parametrize(
    ("parallelism", "sharding", "sentence"),
    [
        ({"tensor": 2}, {}, "the model has 3 attention heads, which 2 ranks do not divide"),
        (
            {"context": {"size": 2, "method": "ulysses"}},
            {},
            "3 attention heads, which 2 ranks do not divide; use method",
        ),
        (
            {"pipeline": {"size": 2, "schedule": "zero-bubble", "stages_per_rank": 2}},
            {},
            "2 blocks, fewer than 4 pipeline",
        ),
        (
            {"pipeline": {"size": 2, "schedule": "interleaved-1f1b", "stages_per_rank": 1}},
            {},
            "expects stages_per_rank of at least 2",
        ),
        ({"pipeline": {"size": 2, "stages_per_rank": 2}}, {}, 'schedule = "1f1b" has 1 stage per rank'),
        ({"pipeline": 2}, {"stage": 3}, "use stage = 2 or less with pipeline"),
        ({"tensor": 7}, {}, "needs a multiple of 7 ranks"),
    ],
    ids=str,
)
def test_refused_before_anything_is_built(root, parallelism, sharding, sentence: str) -> None:
    if dist.get_world_size() % 2:
        pytest.skip("needs an even number of ranks")
    tables = {
        **tables_of(root), "parallelism": parallelism, "sharding": sharding, "dataset": {"name": "synthetic"},
        "model": {
            "name": "gpt", "hidden_size": 12, "layers": 2, "attention_heads": 3, "vocab_size": 16, "max_seq_length": 8,
        },
    }  # fmt: skip
    with pytest.raises(JobError) as error, session_of(tables):
        pass
    assert sentence in str(error.value)
