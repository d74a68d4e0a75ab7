"""The command `hpctrain`: one file per subcommand, imported when it is used."""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
from typing import Any

import click

from hpctrain.errors import EXIT_TRAINING, EXIT_USAGE, HpctrainError
from hpctrain.version import __version__
from hpctrain.world.detection import launched
from hpctrain.world.ending import end_process

COMMANDS = ("run", "check", "new", "checkpoint", "plugins", "schema", "bench")


class _Commands(click.Group):
    """Looks a subcommand up in the module of its name, so that only the commands that need torch import it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"hpctrain.cli.{cmd_name}").command
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            sys.exit(128 + signal.SIGPIPE)  # not click's 1, which `checkpoint diff` says, too


@click.command(cls=_Commands)
@click.version_option(__version__, prog_name="hpctrain")
def cli() -> None:
    """Train PyTorch models on HPC clusters: `srun hpctrain run job.toml`."""


def main() -> None:
    """The process of the command."""
    _open_streams()
    code = execute()
    if launched() or "torch.distributed" in sys.modules:  # a rank by itself has a group, too
        end_process(code)
    _flush()
    sys.exit(code)


def execute() -> int:
    """Run the command; errors are sentences on stderr, and the exit code says of which kind they are."""
    try:
        code = cli.main(standalone_mode=False)
    except HpctrainError as error:
        from hpctrain.job.problems import sentence  # here: it imports pydantic, which `--help` does without

        print(sentence(error), file=sys.stderr)
        code = error.exit_code
    except click.ClickException as error:
        error.show()
        code = EXIT_USAGE
    except SystemExit as ending:
        code = ending.code
    except (click.Abort, KeyboardInterrupt):
        code = 130
    except OSError as error:
        if error.filename is not None:
            raise
        # of standard output: what the system says of files the commands tell themselves
        print(f"hpctrain: the output could not be written: {error.strerror or error}", file=sys.stderr)
        code = EXIT_TRAINING
    return code if isinstance(code, int) else 0


class _Stderr(io.FileIO):
    """A line that can't be written, on a full disk for instance, ends nothing and changes no exit code."""

    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except OSError:
            return len(content)


def _open_streams() -> None:
    """Standard streams that take every text, also where whoever started this closed them."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        # else the next file that is opened, a shard say, would get its number, and what libraries print
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - it stays open
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files may be no text
    if isinstance(sys.stderr, io.TextIOWrapper) and sys.stderr is sys.__stderr__:
        raw = io.BufferedWriter(_Stderr(sys.stderr.fileno(), "w", closefd=False))
        sys.stderr = io.TextIOWrapper(raw, sys.stderr.encoding, "backslashreplace", line_buffering=True)


def _flush() -> None:
    """Flush as Python does at its end. Python leaves with 120 where that fails, although the job is done, or saved."""
    try:
        sys.stdout.flush()
    except OSError:  # no room, or nobody reads it any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
