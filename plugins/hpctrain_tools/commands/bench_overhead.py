"""hpctrain bench overhead: measures what trainers add to a small step."""

from __future__ import annotations

import json
import os

import click

from hpctrain.base.launcher_variables import launched
from hpctrain.toolkit.commands import example, hookimpl, say


@click.command("overhead", epilog=example("hpctrain bench overhead -n 2 --only plain,run"))
@click.option("-n", "ranks", type=click.IntRange(min=1), default=1, show_default=True, help="Number of ranks.")
@click.option(
    "--only", metavar="NAME,...", help="These: plain, own-loop, run, accelerate, fabric, lightning (default: all)."
)
@click.option("--steps", default=1000, show_default=True, type=click.IntRange(min=5), help="Steps of a round.")
@click.option(
    "--rounds", default=3, show_default=True, type=click.IntRange(min=1), help="Rounds; the quickest is printed."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
def command(ranks: int, only: str | None, steps: int, rounds: int, as_json: bool) -> int:
    """Measure what hpctrain and other trainers add to the step of a small network, beside plain PyTorch (DDP on several ranks).

    An MLP of 16,728 parameters, AdamW and clipping, batches of 32 and of 1,024 samples in memory, one thread a rank. The trainers
    take turns, each in processes of its own. Under mpiexec or srun every process is a rank, and `--only` names one trainer.
    """
    from hpctrain_tools.bench import start_measuring
    from hpctrain_tools.bench.overhead import chosen, here, lines, measure, missing

    os.environ["OMP_NUM_THREADS"] = "1"  # of this process, whose torch is not imported yet, and of those that it starts
    names = chosen(only)
    absent = {name: line for name in names if (line := missing(name))}
    names = [name for name in names if name not in absent]
    if len(names) == 1 and (launched() or rounds == 1):
        if ranks > 1 and not launched():
            words = ["overhead", "--only", names[0], "--steps", str(steps), "--rounds", "1"]
            return start_measuring(ranks, words, as_json)
        of_loop = here(names[0], steps)
        if of_loop:
            say(json.dumps({names[0]: of_loop}))
        return 0
    found = measure(names, ranks, steps, rounds)
    say(json.dumps(found) if as_json else "\n".join([*lines(found, ranks), *absent.values()]))
    return 0


@hookimpl
def hpctrain_command() -> click.Command:
    return command
