"""User mistakes, as typed: a clear sentence, the right exit code, no traceback, nothing lost."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from jobs import JobFile
from launching import Finished, hpctrain, in_process, run


def refused(done: Finished, code: int, *parts: str) -> None:
    assert done.code == code, done
    assert "Traceback" not in done.err, done
    for part in parts:
        assert part in done.err, (part, str(done))


def line_of(job: JobFile, text: str) -> int:
    return 1 + next(i for i, line in enumerate(job.path.read_text().splitlines()) if line.startswith(text))


def test_every_mistake_of_a_file_is_told_at_once_with_its_line(job: JobFile) -> None:
    job.set(optimizer={"lrr": 1, "lr": "fast"}, model={"hiden_size": 3}, job={"stepz": 4}, batch={"micro_size": 0})
    job.tables["optimzer"] = {}
    job.write()
    done = run(hpctrain("run", "job.toml", "-n", "2"), job.directory)
    refused(
        done, 2,
        f"job.toml:{line_of(job, 'lrr')}: unknown key 'lrr' in [optimizer]; did you mean 'lr'?",
        f'job.toml:{line_of(job, "lr =")}: [optimizer] lr: expected a valid number, found "fast"',
        f"job.toml:{line_of(job, 'hiden')}: unknown key 'hiden_size' in [model]; did you mean 'hidden_size'?",
        f"job.toml:{line_of(job, 'stepz')}: unknown key 'stepz' in [job]; did you mean 'steps'?",
        f"job.toml:{line_of(job, 'micro_size')}: [batch] micro_size: expected greater than or equal to 1, found 0",
        f"job.toml:{line_of(job, '[optimzer]')}: unknown key 'optimzer'; did you mean 'optimizer'?",
    )  # fmt: skip
    assert not job.output.exists()


def test_names_that_nobody_has(job: JobFile) -> None:
    job.set(model={"name": "gtp"}, precision={"mode": "fp23"}, parallelism={"tensr": 2})
    refused(in_process("check", "job.toml", cwd=job.directory), 2, "'gtp'; did you mean 'gpt'?", "'fp23'", "'tensr'")


def test_missing_files_and_bad_toml(job: JobFile) -> None:
    refused(in_process("run", "no.toml", cwd=job.directory), 2, "no.toml: there is no such file")
    (job.directory / "bad.toml").write_text("[job]\nname = \n")
    done = in_process("run", "bad.toml", cwd=job.directory)
    refused(done, 2)
    assert done.err.startswith("bad.toml:2: not valid TOML"), done
    refused(in_process("run", "job.toml", "--resume", "gone", cwd=job.directory), 2, "--resume gone")
    job.set(dataset={"name": "text", "files": ["*.nothing"]}).tables["dataset"].pop("samples")
    job.write()
    refused(in_process("run", "job.toml", cwd=job.directory), 2, "nothing matches '*.nothing'")


def test_weights_that_are_not_there_and_a_model_without_parameters(job: JobFile) -> None:
    missing = in_process("check", "job.toml", "--set", "model.weights='gone'", cwd=job.directory)
    refused(missing, 2, "--set model.weights='gone': [model] weights: there are none at gone")
    job.tables["model"] = {"name": "torch.nn:ReLU", "loss": "torch.nn.functional:cross_entropy"}
    job.write()
    refused(
        in_process("run", "job.toml", cwd=job.directory),
        2,
        "it has no parameter to train: expected one at least with requires_grad = True",
    )


@pytest.mark.cases(
    thorough=[
        "words1-12 does not divide over 5 data-parallel ranks x micro_size 1; expected a multiple of 5, such as 10",
        "words3-replicate 3 needs a multiple of 3 ranks, but there are 2",
    ]
)
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["-n", "0"], "-n"),
        (
            ["-n", "5"],
            "12 does not divide over 5 data-parallel ranks x micro_size 1; expected a multiple of 5, such as 10",
        ),
        (["--set", "batch.micro_size=5"], "12 does not divide over 1 data-parallel ranks x micro_size 5"),
        (["-n", "2", "--set", "parallelism.replicate=3"], "replicate 3 needs a multiple of 3 ranks, but there are 2"),
        (["--set", "optimizer"], "--set optimizer: expected table.key=value"),
        (
            ["--set", "optimizer.lr=-1"],
            "--set optimizer.lr=-1: [optimizer] lr: expected greater than or equal to 0, found -1",
        ),
        (
            ["--set", "job.epochs=1"],
            "expected either steps or epochs, found both; --set job.steps= or --set job.epochs= removes one",
        ),
        (["--set", "model.vocab_size=8", "--set", "dataset.name='stdlib-text'"], "unknown key 'samples'"),
        (["--set", "dataset.seq_length=9"], "longer than the model's max_seq_length 8"),
        (["--set", "model.freeze=['nothing.*']"], "no parameter matches 'nothing.*'"),
        (["--set", "communicator.name='mpi'"], "not started by an MPI launcher"),
        (["--set", "communicator.device='accelerator'"], "device = 'accelerator': none fits all ranks"),
        (["--set", "model.weights='none.safetensors'"], "there are no weights at none.safetensors"),
    ],
)
def test_impossible_values(job: JobFile, words: list[str], sentence: str) -> None:
    if "-n" in words:
        done = run(hpctrain("run", "job.toml", *words), job.directory)
    else:
        done = in_process("run", "job.toml", *words, cwd=job.directory)
    refused(done, 3 if "MPI launcher" in sentence or "none fits" in sentence else 2, sentence)


def test_batches_by_token_budget_that_cannot_be(job: JobFile) -> None:
    def check(*words: str) -> Finished:
        return in_process("check", "job.toml", *words, cwd=job.directory)

    job.tables["batch"] |= {"tokens": 64}
    job.write()
    refused(
        check(), 2, f"job.toml:{line_of(job, '[batch]')}: [batch]: expected either global_size and micro_size or tokens and ",
        "found global_size, micro_size, tokens",
    )  # fmt: skip
    job.tables["batch"] = {"tokens": 6, "micro_tokens": 6}
    job.write()
    refused(
        check(),
        2,
        "[batch] tokens: sample 0 of 'synthetic' has 8 tokens, but a forward takes (micro_tokens) 6; raise that, or cut",
    )
    (job.directory / "mine.py").write_text(
        "def data(split):\n    return [{'input_ids': 1}] if split == 'train' else None\n"
    )
    job.tables |= {"dataset": {"name": "mine:data"}, "batch": {"tokens": 64, "micro_tokens": 16}}
    job.write()
    refused(check(), 2, "the samples of 'mine:data' are of unknown length")


def test_ids_that_the_model_does_not_have(job: JobFile) -> None:
    np.save(job.directory / "tokens.npy", np.arange(1000, dtype=np.int32) % 70)
    job.tables["dataset"] = {"name": "tokens", "path": "tokens.npy"}
    job.write()
    refused(in_process("run", "job.toml", cwd=job.directory), 2, "ids up to 69", "vocab_size is 64")


def test_extends_is_relative_and_has_no_circles(job: JobFile) -> None:
    (job.directory / "sub").mkdir()
    (job.directory / "sub" / "child.toml").write_text(
        'extends = "../job.toml"\n[job]\nsteps = 1\n[optimizer]\nlr = 0.5\n'
    )
    done = in_process("run", "sub/child.toml", cwd=job.directory)
    assert done.code == 0 and [row["lr"] for row in job.rows()] == [0.5], done
    job.path.write_text('extends = "sub/child.toml"\n' + job.path.read_text())
    refused(in_process("run", "job.toml", cwd=job.directory), 2, "job.toml:1: extends goes in a circle")


@pytest.mark.thorough
def test_a_directory_that_holds_another_job(job: JobFile) -> None:
    assert in_process("run", "job.toml", cwd=job.directory).code == 0
    before = (job.output / "metrics.jsonl").read_bytes()
    done = run(hpctrain("run", "job.toml", "-n", "2", "--set", "model.hidden_size=32"), job.directory)
    refused(done, 2, "holds another job", "model.hidden_size was 16, is 32")
    assert (job.output / "metrics.jsonl").read_bytes() == before


def test_a_checkpoint_of_another_optimizer(job: JobFile) -> None:
    assert in_process("run", "job.toml", cwd=job.directory).code == 0
    done = in_process("run", "job.toml", "--set", "job.steps=9", "--set", "optimizer.name='sgd'", cwd=job.directory)
    refused(done, 5, "another model or optimizer")
    assert len(job.losses()) == 4


def test_a_corrupt_checkpoint_is_passed_over(job: JobFile) -> None:
    job.set(checkpoint={"every_steps": 2})
    assert in_process("run", "job.toml", cwd=job.directory).code == 0
    first = job.losses()
    shard = job.output / "checkpoints" / "step-00000004" / "shard-00000.h5"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    done = in_process("run", "job.toml", cwd=job.directory)
    assert done.code == 0 and "from step 2" in done.out and "shard-00000.h5" in done.err, done
    assert job.losses() == first


def test_all_checkpoints_corrupt(job: JobFile) -> None:
    assert in_process("run", "job.toml", cwd=job.directory).code == 0
    (job.output / "checkpoints" / "step-00000004" / "manifest.json").write_text("{}")
    refused(in_process("run", "job.toml", cwd=job.directory), 5, "none of the checkpoints", "manifest.json")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB."""
    path = tmp_path / "small"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(path)], timeout=20)
    assert mounted.returncode == 0, "mounting a tmpfs needs root"
    yield path
    subprocess.run(["umount", str(path)], check=True, timeout=20)


@pytest.mark.thorough
def test_a_full_disk_keeps_the_older_checkpoint(job: JobFile, small_disk: Path) -> None:
    job.set(
        job={"output_dir": str(small_disk / "out")}, model={"hidden_size": 64}, checkpoint={"every_steps": 2},
        optimizer={"name": "adamw"},
    )  # fmt: skip
    assert in_process("run", "job.toml", "--set", "job.steps=2", cwd=job.directory).code == 0
    filler = os.open(small_disk / "filler", os.O_CREAT | os.O_WRONLY)
    stat = os.statvfs(small_disk)
    os.write(filler, bytes(stat.f_bavail * stat.f_frsize - 200_000))
    os.close(filler)
    done = run(hpctrain("run", "job.toml", "-n", "2", "--set", "job.steps=6"), job.directory)
    refused(done, 4, "no space left on device", "step-00000002")
    (small_disk / "filler").unlink()
    done = run(hpctrain("run", "job.toml", "-n", "2", "--set", "job.steps=6"), job.directory)
    assert done.code == 0 and "from step 2" in done.out, done


def test_an_output_directory_that_cannot_be_written(job: JobFile) -> None:
    (job.directory / "file").write_text("")
    refused(
        in_process("run", "job.toml", "--set", "job.output_dir='file/out'", cwd=job.directory), 2, "cannot be written"
    )


def test_plugin_modules_that_do_not_work(job: JobFile) -> None:
    broken = {
        "raises": "raise ValueError('broken on purpose')",
        "signature": "from hpctrain.api import hookimpl\n@hookimpl\ndef hpctrain_step_end(step, losses): pass",
        "unknown": "from hpctrain.api import hookimpl\n@hookimpl\ndef hpctrain_modell(): return []",
        "needs": "import a_package_that_is_not_there",
    }
    sentences = {
        "raises": "raised ValueError: broken on purpose",
        "signature": "Argument(s) {'losses'} are declared in the hookimpl but can not be found in the hookspec",
        "unknown": "the hook 'hpctrain_modell', which does not exist",
        "needs": "needs the package 'a_package_that_is_not_there'",
    }
    for name, source in broken.items():
        (job.directory / f"{name}.py").write_text(source)
        done = in_process("check", "job.toml", "--set", f"plugins.load=['{name}']", cwd=job.directory)
        refused(done, 3, f"[plugins] load: {name}", sentences[name])


def test_a_blocked_plugin_that_the_job_needs(job: JobFile) -> None:
    job.set(plugins={"block": ["model.gpt"]})
    refused(in_process("check", "job.toml", cwd=job.directory), 3, "model plugin 'gpt' is blocked")


@pytest.mark.nightly
def test_python_without_a_job_file_has_the_same_errors(job: JobFile) -> None:
    (job.directory / "script.py").write_text(
        "import hpctrain\n"
        "try:\n"
        "    hpctrain.run({'job': {'name': 'x', 'steps': 0}})\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error.exit_code, error)\n"
    )
    done = run([sys.executable, "script.py"], job.directory)
    assert done.out.startswith("JobError 2 job: [job] steps: expected greater than or equal to 1, found 0"), done
    assert "lacks the table [model]" in done.out


def test_a_name_that_the_locale_can_not_write(job: JobFile) -> None:
    job.set(job={"name": "läuft"})
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = run(hpctrain("check", "job.toml"), job.directory, env=locale)
    refused(done, 2, "[job] name: expected a name in the locale's encoding, ascii; LC_ALL=C.UTF-8 allows any, found")
