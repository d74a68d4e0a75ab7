"""The common parts of schedulers' plugins: scripts from templates, and a scheduler's commands with a time limit."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator

from hpctrain.api import EnvironmentUnfitError, UsageError

_SECONDS = 60.0  # for a scheduler's command; a controller under load answers within a few seconds


def _one_line(text: str) -> str:
    if not text.isprintable() or not text:
        raise ValueError("expected one line of printable text")
    return text


Line = Annotated[str, AfterValidator(_one_line)]
"""A text that fits in one line of a script."""


def _printable(value: object) -> str:
    """The value as text. Raises UsageError for a line end, which would start another line, such as a comment for the scheduler."""
    if not str(value).isprintable():
        raise UsageError(
            f"found {str(value)!r}, expected printable text without line ends: it becomes a line of the script"
        )
    return str(value)


def quoted(*values: object) -> str:
    """Values as words of the shell. Raises UsageError for one that isn't printable."""
    return " ".join(shlex.quote(_printable(value)) for value in values)


def filled(template: Path, **values: Any) -> str:
    """A Jinja template as text; it may include others of its folder and of the one above. `|q` quotes a value for the shell,
    `|words` several. A missing value is an error, not an empty text. Raises UsageError for a value that isn't printable."""
    import jinja2  # here: ranks load this module, too, and make no scripts

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([template.parent, template.parent.parent]),
        undefined=jinja2.StrictUndefined,  # a script with a hole would be submitted
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=_printable,  # every value that a template prints
    )
    environment.filters["q"] = quoted
    environment.filters["words"] = lambda words: quoted(*words)
    return environment.get_template(template.name).render(values)


def clock(seconds: int) -> str:
    """90061 -> "25:01:01", which every scheduler reads as hours, minutes and seconds."""
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def told_by(words: Sequence[str], what: str) -> str:
    """The output of a scheduler's command. what: the start of the sentence about a failure, such as "sbatch refused the job".

    Raises EnvironmentUnfitError if this machine lacks the command or it does not answer, UsageError with the command's own
    sentence if it fails.
    """
    done = _run(words)
    if done.returncode:
        sentence = " ".join((done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").split())
        raise UsageError(f"{what}: {sentence}")
    return done.stdout.strip()


def asked(words: Sequence[str]) -> str | None:
    """The output of a scheduler's command; None if it fails. Raises EnvironmentUnfitError as `told_by` does."""
    done = _run(words)
    return None if done.returncode else done.stdout.strip()


def _run(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    if shutil.which(words[0]) is None:
        raise EnvironmentUnfitError(
            f"found no command {words[0]} on this machine, expected one that reaches the scheduler: run hpctrain where it is "
            "installed, such as on a login node, or load its module"
        )
    try:
        # no stdin: some commands would read a script from the terminal, and wait for it
        return subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        raise EnvironmentUnfitError(
            f"{words[0]} did not answer within {_SECONDS:.0f} s; is the scheduler up? The same command works once it is"
        ) from None
