"""The command `hpctrain`. The core has `run`; tools and plugins add the other commands."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import click

from hpctrain.base.errors import EXIT_TRAINING, EXIT_USAGE, HpctrainError
from hpctrain.base.launcher_variables import launched
from hpctrain.cli import run
from hpctrain.cli.groups import OpenGroup
from hpctrain.ranks.process import end_process
from hpctrain.version import __version__

GROUPS = {
    "Train": ("new", "check", "plan", "prove", "run"),
    "See runs": ("runs", "top", "status", "where", "report", "profile"),
    "On a scheduler": ("submit", "cancel"),
    "With a trained model": ("evaluate", "predict", "sample", "checkpoint"),
    "Machine": ("doctor", "bench"),
    "More": ("plugins", "schema", "convert"),
}
"""The first-party commands as the help shows them: the core's, and those that hpctrain_tools adds as any plugin does."""
_EXAMPLE = """\b
Example:
  hpctrain new job.toml            a commented job file, to be edited
  hpctrain check job.toml -n 4     its mistakes, without training
  hpctrain run job.toml -n 4       4 ranks on this machine
  srun hpctrain run job.toml       the ranks of a Slurm allocation
  hpctrain COMMAND --help          the options of a command
"""


class _Commands(OpenGroup):
    """The first level of commands. Their modules import torch where they need it: help and completion must be quick."""

    @property
    def place(self) -> str:
        return ""

    def sections(self, names: list[str]) -> dict[str, list[str]]:
        return {title: [name for name in group if name in names] for title, group in GROUPS.items()}

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            sys.exit(128 + signal.SIGPIPE)  # not click's 1, which for `checkpoint diff` means a difference


@click.command(cls=_Commands, epilog=_EXAMPLE)
@click.version_option(__version__, prog_name="hpctrain")
def cli() -> None:
    """Train PyTorch models on HPC clusters: `srun hpctrain run job.toml`."""


cli.add_command(run.command)


def main(words: Sequence[str] | None = None) -> None:
    """Run the command and end the process. words: None for those of the command line."""
    _open_streams()
    code = execute(words)
    if launched() or "torch.distributed" in sys.modules:  # a single rank has a group, too
        end_process(code)
    _flush()
    sys.exit(code)


def execute(words: Sequence[str] | None = None) -> int:
    """Run the command. Errors become sentences on stderr, and the exit code tells their kind."""
    try:
        code = cli.main(words, prog_name=None if words is None else "hpctrain", standalone_mode=False)
    except HpctrainError as error:
        from hpctrain.job.problems import sentence  # here: it imports pydantic, which `--help` does not need

        print(sentence(error), file=sys.stderr)
        code = error.exit_code
    except click.ClickException as error:
        error.show()
        code = EXIT_USAGE
    except SystemExit as ending:
        code = ending.code
    except (click.Abort, KeyboardInterrupt):
        code = 130  # 128 + SIGINT, as shells say
    except OSError as error:
        if error.filename is not None:
            raise  # a defect: commands report errors of files themselves
        print(f"hpctrain: the output could not be written: {error.strerror or error}", file=sys.stderr)
        code = EXIT_TRAINING
    return code if isinstance(code, int) else 0


class _Stderr(io.FileIO):
    """Drops lines that cannot be written, on a full disk for instance: they must not change the exit code."""

    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except OSError:
            return len(content)


def _open_streams() -> None:
    """Make standard streams accept any text, even if the parent process has closed them."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        # else the next open file, a shard for instance, would get its descriptor, and with it the output of libraries
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - it stays open
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # file names may contain undecodable bytes
    if isinstance(sys.stderr, io.TextIOWrapper) and sys.stderr is sys.__stderr__:
        raw = io.BufferedWriter(_Stderr(sys.stderr.fileno(), "w", closefd=False))
        sys.stderr = io.TextIOWrapper(raw, sys.stderr.encoding, "backslashreplace", line_buffering=True)


def _flush() -> None:
    """Flush as Python does at exit. Where that fails Python exits with 120, even if the job is done or saved."""
    try:
        sys.stdout.flush()
    except OSError:  # no space left, or no reader
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more
