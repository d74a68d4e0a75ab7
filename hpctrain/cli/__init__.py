"""The command `hpctrain`: one file per subcommand, imported when it is used."""

from __future__ import annotations

import importlib
import os
import sys

import click

from hpctrain.errors import EXIT_USAGE, HpctrainError
from hpctrain.version import __version__
from hpctrain.world.detection import launched
from hpctrain.world.ending import end_process

COMMANDS = ("run", "check", "new", "checkpoint", "plugins", "schema", "bench")


class _Commands(click.Group):
    """Looks a subcommand up in the module of its name: torch is imported by those that need it only."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"hpctrain.cli.{cmd_name}").command
        return command


@click.command(cls=_Commands)
@click.version_option(__version__, prog_name="hpctrain")
def cli() -> None:
    """Train PyTorch models on HPC clusters: `srun hpctrain run job.toml`."""


def main() -> None:
    """The process of the command."""
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
    except BrokenPipeError:  # `hpctrain plugins | head`
        sys.stderr.close()
        code = 0
    return code if isinstance(code, int) else 0


def _flush() -> None:
    """Python does so at its end, and leaves with 120 where that fails; a job that is done, or saved, is so all the same."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:  # no room, or nobody reads it any more
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
