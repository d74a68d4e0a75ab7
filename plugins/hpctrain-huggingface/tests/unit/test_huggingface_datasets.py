"""Data sets of Hugging Face: what a row becomes, which rows come, and the losses of transformers' own Trainer."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hub_models
import pytest
import tomli
import torch
from click.testing import CliRunner
from datasets import Dataset, DatasetDict, load_dataset
from hpctrain_huggingface.dataset.options import HubDatasetOptions
from hpctrain_huggingface.dataset.plugin import HubDataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import hpctrain
from hpctrain.api import DatasetContext, HpctrainError
from hpctrain.cli import cli
from hpctrain.data.order import SampleOrder

WORDS = ["<pad>", "<eos>", "<user>", "<bot>", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
TEMPLATE = (
    "{% for m in messages %}{{ '<user> ' if m['role'] == 'user' else '<bot> ' }}{{ m['content'] }}"
    "{{ ' <eos> ' if m['role'] == 'assistant' else ' ' }}{% endfor %}{{ '<bot> ' if add_generation_prompt else '' }}"
)
IGNORED = -100


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tokenizer that splits at spaces."""
    path = tmp_path_factory.mktemp("tokenizer")
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, "<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token="<pad>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(str(path))
    return path


def conversation(*turns: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[place % 2], "content": turn} for place, turn in enumerate(turns)]


ROWS = [
    {
        "messages": conversation("one two", "three", "four", " ".join(WORDS[4 + row % 9] for _ in range(1 + row % 4))),
        "text": " ".join(WORDS[4 + (row + place) % 9] for place in range(2 + row % 5)),
        "prompt": "one two",
        "completion": WORDS[4 + row % 9],
        "label": row % 3,
        "number": float(row),
    }
    for row in range(24)
]


def opened(path: Path, seq_length: int | None = 16, **options: Any) -> Any:
    return HubDataset(HubDatasetOptions(path=path, **options)).open("train", DatasetContext(seq_length, None, 0))


def words(ids: torch.Tensor) -> str:
    return " ".join("_" if one == IGNORED else WORDS[one] for one in ids.tolist())


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def test_the_loss_is_that_of_the_answers(rows: Path, tokenizer: Path) -> None:
    """A label is the next id; the assistant's turns have one, with the token that ends them."""
    sample = opened(rows, tokenizer=tokenizer, messages="messages")[1]
    assert words(sample["input_ids"]) == "<user> one two <bot> three <eos> <user> four <bot> two two"
    assert words(sample["labels"]) == "_ _ _ three <eos> _ _ _ two two <eos>"
    every = opened(rows, tokenizer=tokenizer, messages="messages", answers_only=False)[1]
    assert words(every["labels"]) == "one two <bot> three <eos> <user> four <bot> two two <eos>"
    full = opened(rows, 14, tokenizer=tokenizer, messages="messages", full_length=True)[1]
    assert words(full["labels"]) == "_ _ _ three <eos> _ _ _ two two <eos> _ _ _" and len(full["input_ids"]) == 14
    short = opened(rows, 4, tokenizer=tokenizer, messages="messages")[1]
    assert words(short["input_ids"]) == "<user> one two <bot>" and words(short["labels"]) == "_ _ _ three"


def test_texts_prompts_classes_and_columns(rows: Path, tokenizer: Path) -> None:
    text = opened(rows, tokenizer=tokenizer, text="text")[0]
    assert (words(text["input_ids"]), words(text["labels"])) == ("one two", "two <eos>")
    answer = opened(rows, tokenizer=tokenizer, prompt="prompt", completion="completion")[2]
    assert (words(answer["input_ids"]), words(answer["labels"])) == ("one two three", "_ three <eos>")
    labelled = opened(rows, tokenizer=tokenizer, text="text", label="label", end_of_text=False)[4]
    assert words(labelled["input_ids"]) == "five six seven eight nine one" and labelled["labels"] == 1
    plain = opened(rows, columns=["number", "label"])[5]
    assert {name: value.item() for name, value in plain.items()} == {"number": 5.0, "label": 2}


def test_pairs_of_answers(tmp_path: Path, tokenizer: Path) -> None:
    """Answers to a prompt, messages behind those of the prompt, and whole conversations have one form."""
    whole = [conversation("one", "two", "three", answer) for answer in ("four", "five six")]
    rows = [
        {"prompt": "one two", "chosen": "three", "rejected": "four five"},
        {"prompt": whole[0][:3], "chosen": whole[0][3:], "rejected": whole[1][3:]},
        {"chosen": whole[0], "rejected": whole[1]},
    ]
    for number, row in enumerate(rows):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(json.dumps(row) + "\n")
        prompt = {"prompt": "prompt"} if "prompt" in row else {}
        sample = opened(path, tokenizer=tokenizer, chosen="chosen", rejected="rejected", **prompt)[0]
        found = {name: words(ids) for name, ids in sample.items()}
        if number == 0:
            assert found["chosen_input_ids"] == "one two three" and found["chosen_labels"] == "_ three <eos>"
            assert found["rejected_labels"] == "_ four five <eos>"
        else:
            assert found["chosen_input_ids"] == "<user> one <bot> two <eos> <user> three <bot> four"
            assert found["chosen_labels"] == "_ _ _ _ _ _ _ four <eos>"
            assert found["rejected_labels"] == "_ _ _ _ _ _ _ five six <eos>"


def test_splits_slices_and_what_is_saved_on_disk(tmp_path: Path, rows: Path) -> None:
    whole = load_dataset("json", data_files={"train": str(rows)}, split="train")
    both = DatasetDict({"train": whole.select(range(20)), "validation": whole.select(range(20, 24))})
    both.save_to_disk(str(tmp_path / "both"))
    plugin = HubDataset(HubDatasetOptions(path=tmp_path / "both", columns=["number"], train="train[50%:]"))
    context = DatasetContext(None, None, 0)
    train, validation = (plugin.open(split, context) for split in ("train", "validation"))
    assert [train[place]["number"].item() for place in (0, 9)] == [10.0, 19.0] and len(train) == 10
    assert len(validation) == 4 and plugin.open("test", context) is None
    again = HubDataset(HubDatasetOptions(path=tmp_path / "both", columns=["number"])).open("train", context)
    assert train.fingerprint() != again.fingerprint()
    alone = HubDataset(HubDatasetOptions(path=rows, columns=["number"]))
    assert alone.open("validation", context) is None, "a file is no validation of itself"
    sliced = HubDatasetOptions(path=rows, columns=["number"], train="train[:20]", validation="train[20:]")
    assert [len(HubDataset(sliced).open(split, context)) for split in ("train", "validation")] == [20, 4]
    ends = HubDatasetOptions(path=tmp_path / "both", columns=["number"], train="train[:2]+train[18:]")
    assert [one["number"].item() for one in HubDataset(ends).open("train", context)] == [0.0, 1.0, 18.0, 19.0]
    with pytest.raises(HpctrainError, match="has no split 'dev'; it has train, validation"):
        HubDataset(HubDatasetOptions(path=tmp_path / "both", columns=["number"], train="dev")).open("train", context)


@pytest.mark.parametrize("readers", [1, 2, 3])
def test_a_stream_is_read_once_by_all_readers_and_goes_on(rows: Path, readers: int) -> None:
    """Fewer shards than readers, too: each reads all and keeps its own."""
    stream = opened(rows, columns=["number"], streaming=True)
    parts = [stream.shard(readers, reader) for reader in range(readers)] if readers > 1 else [stream]
    found = [[item["number"].item() for item in part] for part in parts]
    assert sorted(one for part in found for one in part) == [float(row) for row in range(24)]
    first = iter(parts[0])
    begun = [next(first)["number"].item() for _ in range(3)]
    state = parts[0].state()
    fresh = opened(rows, columns=["number"], streaming=True)
    fresh = fresh.shard(readers, 0) if readers > 1 else fresh
    fresh.load_state(state)
    assert begun + [item["number"].item() for item in fresh] == found[0]


def test_what_is_wrong_is_told(tmp_path: Path, rows: Path, tokenizer: Path) -> None:
    for options, told in (
        ({"path": tmp_path / "gone.parquet", "columns": ["x"]}, "there is no data set"),
        ({"path": rows, "columns": ["gone"]}, "has no column 'gone'; it has messages"),
        ({"path": rows, "tokenizer": tmp_path, "text": "text"}, "[dataset] tokenizer: "),
        ({"path": rows, "tokenizer": tmp_path / "gone", "text": "text"}, "tokenizer: there is no directory"),
    ):
        with pytest.raises(HpctrainError) as raised:
            opened(**options)
        assert told in str(raised.value), options
    with pytest.raises(ValueError, match='text needs tokenizer = "DIR"'):
        HubDatasetOptions(path=rows, text="text")
    with pytest.raises(HpctrainError, match="a row can't be made into a sample"):
        opened(rows, tokenizer=tokenizer, messages="number")[0]


@pytest.mark.thorough
def test_the_losses_are_those_of_transformers_trainer(tmp_path: Path, rows: Path, tokenizer: Path) -> None:
    """Ten steps of conversations, with AdamW and clipping, in fp64."""
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    config = {**hub_models.CONFIGS["gpt2"], "vocab_size": len(WORDS), "n_positions": 32, "pad_token_id": 0}
    path = hub_models.save(config, tmp_path / "saved")
    tables = hub_models.job(tmp_path / "run", path, job={"steps": 10})
    tables |= {
        "dataset": {
            "name": "huggingface", "path": str(rows), "tokenizer": str(tokenizer), "messages": "messages",
        },
        "optimizer": {"name": "adamw", "lr": 1e-2, "weight_decay": 0.0, "clip_norm": 1.0},
        "batch": {"global_size": 8, "micro_size": 4},
    }  # fmt: skip
    tables.pop("evaluation")
    hpctrain.run(tables)
    found = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]

    samples = opened(rows, 32, tokenizer=tokenizer, messages="messages")
    order = SampleOrder(len(samples), 7, samples.fingerprint())

    def batch(places: Any) -> dict[str, torch.Tensor]:
        """Whole rows: transformers shifts the labels itself."""
        picked = [samples[int(place)] for place in places]
        ids = [torch.cat([one["input_ids"], one["labels"][-1:]]) for one in picked]
        labels = [torch.cat([torch.tensor([IGNORED]), one["labels"]]) for one in picked]
        pad = torch.nn.utils.rnn.pad_sequence
        return {"input_ids": pad(ids, True, 0), "labels": pad(labels, True, IGNORED)}

    class Ours(Trainer):  # type: ignore[misc]
        """Takes the job's order of samples, and notes losses unrounded."""

        def get_train_dataloader(self) -> Any:
            return [batch(order.at(micro * 4, micro * 4 + 4)) for micro in range(20)]

        def log(self, logs: dict[str, float], *args: Any, **keywords: Any) -> None:
            pass

        def training_step(self, *args: Any, **keywords: Any) -> torch.Tensor:
            loss: torch.Tensor = super().training_step(*args, **keywords)
            parts.append(float(loss))
            return loss

    parts: list[float] = []
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "theirs"), max_steps=10, gradient_accumulation_steps=2, learning_rate=1e-2,
        weight_decay=0.0, max_grad_norm=1.0, lr_scheduler_type="constant", use_cpu=True, report_to=[], save_strategy="no",
        logging_strategy="no", optim="adamw_torch", disable_tqdm=True,
    )  # fmt: skip
    module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    Ours(model=module, args=arguments, train_dataset=Dataset.from_list([{"x": 0}] * 24)).train()
    expected = list(pairs(parts))
    assert found == pytest.approx(expected, rel=1e-6)  # transformers computes the loss in float32


@pytest.mark.thorough
def test_packed_conversations(tmp_path: Path, rows: Path, tokenizer: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The losses of padded ones; tokens are counted once, for all jobs."""
    config = {**hub_models.CONFIGS["gpt2"], "vocab_size": len(WORDS), "n_positions": 32, "pad_token_id": 0}
    path = hub_models.save(config, tmp_path / "saved")
    caplog.set_level("INFO", "hpctrain")
    found = []
    for packing in (True, False):
        tables = hub_models.job(tmp_path / str(packing), path)
        tables["dataset"] = {
            "name": "huggingface", "path": str(rows), "tokenizer": str(tokenizer), "messages": "messages",
            "cache": str(tmp_path / "cache"),
        }  # fmt: skip
        tables["batch"] = {"tokens": 90, "micro_tokens": 45, "packing": packing}
        tables.pop("evaluation")
        found.append(hpctrain.run(tables)["losses"])
    assert found[0] == pytest.approx(found[1], rel=1e-9) and len({round(loss, 6) for loss in found[0]}) == 4
    assert caplog.text.count("counting the tokens of 24 rows") == 1
    context = DatasetContext(32, None, 0, tmp_path / "cache", by_tokens=True)
    options = HubDatasetOptions(path=rows, tokenizer=tokenizer, messages="messages")
    samples: Any = HubDataset(options).open("train", context)
    assert samples.lengths().tolist() == [len(samples[place]["labels"]) for place in range(24)]
    short = tmp_path / "short.jsonl"
    short.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("", "one", "one two")))
    options = HubDatasetOptions(path=short, tokenizer=tokenizer, text="text", end_of_text=False)
    empty: Any = HubDataset(options).open("train", context)
    assert empty.lengths().tolist() == [1, 1, 1]
    assert [words(empty[place]["labels"]) for place in range(3)] == ["_", "_", "two"]
    assert empty[0]["input_ids"].dtype == torch.int64
    options = HubDatasetOptions(path=rows, tokenizer=tokenizer, messages="messages")
    cut: Any = HubDataset(options).open("train", DatasetContext(9, None, 0, tmp_path / "cache", by_tokens=True))
    assert cut.lengths().max() == 9


@pytest.mark.nightly
def test_the_blocks_of_the_page_train(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block of docs/fine-tune.md over the first one, with a small model in the place of the pretrained one."""
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[4] / "docs" / "fine-tune.md").read_text()
    first, *others = [tomli.loads(one) for one in re.findall(r"^```toml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)]
    (export,) = re.findall(r"^```bash\nhpctrain (.*)\n```$", page, re.MULTILINE)
    config = {**hub_models.CONFIGS["llama"], "vocab_size": 300, "max_position_embeddings": 4096, "pad_token_id": 0}
    shutil.copytree(tokenizer, hub_models.save(config, tmp_path / "pretrained"), dirs_exist_ok=True)
    Path("conversations.jsonl").write_text("".join(json.dumps({"messages": row["messages"]}) + "\n" for row in ROWS))
    pairs = [{"prompt": "one", "chosen": f"two {WORDS[4 + n]}", "rejected": "six"} for n in range(8)]
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    columns = {name: name for name in ("prompt", "chosen", "rejected")}
    preferred = {"name": "huggingface", "path": "pairs.jsonl", "tokenizer": "pretrained", **columns, "seq_length": 32}
    assert len(others) == 4
    for number, block in enumerate([{}, *others]):
        job = {**first["job"], "steps": 2, "output_dir": f"runs/{number}"}
        tables = {**first, **block, "job": job}
        if "preference" in tables["model"]:
            tables["dataset"] = preferred
        elif "hook" in block:
            tables["model"] = others[1]["model"]  # of an adapter that is merged
        assert hpctrain.run(tables)["step"] == 2
    assert (tmp_path / "runs" / "4" / "export" / "model.safetensors").is_file()
    done = CliRunner().invoke(cli, export.replace("runs/tuned", "runs/0").split())
    assert done.exit_code == 0 and (tmp_path / "OUT" / "config.json").is_file(), done


def pairs(parts: list[float]) -> Iterator[float]:
    """The loss of each step of two micro batches, whose parts transformers has divided by the labels of both."""
    for first, second in zip(parts[::2], parts[1::2], strict=True):
        yield first + second
