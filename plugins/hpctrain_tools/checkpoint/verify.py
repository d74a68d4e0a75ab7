"""hpctrain checkpoint verify and diff: whether every byte is as written, and which tensors of two checkpoints differ."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.base.errors import CheckpointError
from hpctrain.cli.options import example, say
from hpctrain_tools.checkpoint.common import CHECKPOINT, Formats, bytes_progress, files_of, sizes_of_files, table
from hpctrain_tools.options import size_text

EXIT_DIFFERENT = 1
"""The exit code of diff and h5diff."""


@click.command("verify", epilog=example("hpctrain checkpoint verify runs/gpt/checkpoints/latest"))
@click.argument("checkpoint", metavar="CKPT", type=CHECKPOINT)
@click.pass_obj
def verify(formats: Formats, checkpoint: Path) -> None:
    """Read and check all of CKPT. If it is damaged, exit 5 with the file, tensor and part of each fault."""
    with files_of(checkpoint):
        found = formats.find(checkpoint)
        with bytes_progress("verifying") as progress:
            faults = found.format.verify(checkpoint, progress)
        if faults:
            listed = "".join(f"\n  {fault}" for fault in faults)
            count = f"{len(faults)} fault{'s' if len(faults) > 1 else ''}"
            raise CheckpointError(f"checkpoint {checkpoint} isn't whole: {count}{listed}")
        tensors, files = found.format.tensors(checkpoint), sizes_of_files(checkpoint)
    nbytes = sum(files.values())
    say(f"{checkpoint}: whole, {len(tensors)} tensors, {size_text(nbytes)} in {len(files)} files")


@click.command("diff", epilog=example("hpctrain checkpoint diff runs/a/checkpoints/latest runs/b/checkpoints/latest"))
@click.argument("a", metavar="A", type=CHECKPOINT)
@click.argument("b", metavar="B", type=CHECKPOINT)
@click.pass_obj
def diff(formats: Formats, a: Path, b: Path) -> int:
    """Compare the checkpoints A and B by value; exit 0 if all tensors are equal, 1 if some differ.

    A and B may have different formats and layouts.
    """
    from hpctrain_tools.checkpoint.comparison import compare, compare_values

    with files_of(a):
        one, other = formats.find(a), formats.find(b)
        with bytes_progress("comparing") as progress:
            differences = compare(one, other, progress)
        values = compare_values(one.format.read_values(a), other.format.read_values(b))
    for sentence in values:
        say(f"value {sentence}")
    if not differences:
        say("all tensors are equal")
        return 0
    rows = [
        (d.name, f"{d.elements} of {d.total}", f"{d.largest:.3g}", f"{d.relative:.3g}", d.forms) for d in differences
    ]
    say(table(("TENSOR", "VALUES THAT DIFFER", "LARGEST |A-B|", "|A-B|/|A|", "FORM"), rows))
    say(f"{len(differences)} tensors differ")
    return EXIT_DIFFERENT
