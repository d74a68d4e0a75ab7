"""Numbers of a run, as the recorder kept them, and the first difference between two runs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

EXACT, CLOSE, ALIKE = 1e-6, 2e-4, 5e-2
"""Relative tolerances: of the same sums in the same order; in another order; in other dtypes."""
# A tensor whose norm is below this share of all tensors' is compared by all tensors' norm
_NEGLIGIBLE = 1e-3
# A gradient whose norm is below this share of all gradients' may be rounding errors, as that of the keys' biases in attention. An
# optimizer that divides by its size makes whole steps of them, so such parameters are not compared.
_NOISE = 1e-5
_SAID = re.compile(r"^hpctrain: (?!warning)(.*)", re.MULTILINE)
_RAISED = re.compile(r"^((?:\w[\w.]*(?:Error|Exception)\b|job\.toml).*)", re.MULTILINE)


@dataclass
class Record:
    """A run. code: its exit code. steps: by number what was kept: "row", "gradients", "parameters", "buffers", "evaluation"."""

    code: int
    screen: str
    directory: Path
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    notes: list[tuple[str, str]] = field(default_factory=list)

    @staticmethod
    def read(code: int, screen: str, directory: Path) -> Record:
        """The record below the directory of a run."""
        found = Record(code, screen, directory)
        for path in sorted((directory / "record").glob("*.pt")):
            found.steps[int(path.stem)] = kept = torch.load(path)
            found.notes += kept["notes"]
        return found

    @property
    def draws(self) -> bool:
        """Whether the model's forward draws random numbers."""
        return any(one["draws"] for one in self.steps.values())

    @property
    def ending(self) -> str:
        """The end of a run that failed, in a sentence."""
        said = [one for one in _SAID.findall(self.screen) if not one.endswith("failed:")] or _RAISED.findall(
            self.screen
        )
        return said[0] if said else f"exit code {self.code}: {self.screen[-300:].strip() or 'without a word'}"

    @property
    def loss(self) -> float:
        """The last step's loss."""
        return float(self.steps[max(self.steps)]["row"]["loss"])


@dataclass(frozen=True)
class Difference:
    """A number in which two runs part."""

    step: int
    what: str
    found: str
    expected: str

    def __str__(self) -> str:
        when = f"at step {self.step}" if self.step else "before the first step"
        return f"{self.what} {when} is {self.found}, expected {self.expected}"

    def hint(self, resumed: bool) -> str:
        """Causes that are likely, in a clause."""
        if resumed:
            return "state that no checkpoint has: of the optimizer, the data, a schedule or a plugin"
        if self.step == 0:
            return "initial values that depend on the rank, or on draws outside of the model's construction"
        if "evaluation" in self.what:
            return (
                "buffers that differ by rank, such as running statistics, or a metric that isn't summed over its group"
            )
        ratio = _ratio(self.found, self.expected)
        if ratio and ("grad" in self.what or self.what == "the loss"):
            return f"sums over another group, or a loss that isn't a mean: it is {ratio} of what it must be"
        if self.what.startswith("the loss"):
            return "draws that differ by rank, statistics of a batch, a batch that the model changes, or a loss that isn't a mean"
        if self.what.startswith("the norm of the parameter"):  # gradients are compared first
            return (
                "a schedule, a hook or an optimizer that does other things by rank, or one that needs whole parameters"
            )
        return "gradients that aren't summed over all ranks"


def _ratio(found: str, expected: str) -> str:
    try:
        one, other = float(found), float(expected.partition(" ")[0])
    except ValueError:
        return ""
    for count in range(2, 9):
        for share, told in ((count, f"{count} times"), (1 / count, f"1/{count}")):
            if other and abs(one / other - share) < 0.01 * share:
                return told
    return ""


@dataclass(frozen=True)
class Distances:
    """The largest relative differences of two runs over all steps. parameters: of the last step, all together."""

    loss: float
    gradient_norm: float
    parameters: float

    @property
    def largest(self) -> float:
        """The largest of them."""
        return max(self.loss, self.gradient_norm, self.parameters)


def distances(found: Record, expected: Record) -> Distances:
    """How far two runs are apart, as far as both came."""
    both = [step for step in expected.steps if step in found.steps and "row" in expected.steps[step]]
    rows = [(found.steps[step]["row"], expected.steps[step]["row"]) for step in both]
    loss, norm = (
        max((_relative(one[key], other[key]) for one, other in rows), default=0.0) for key in ("loss", "grad_norm")
    )
    last = found.steps[both[-1]]["parameters"], expected.steps[both[-1]]["parameters"]
    apart = math.hypot(*(float((one.double() - last[1][name].double()).norm()) for name, one in last[0].items()))
    return Distances(
        loss, norm, apart / max(math.hypot(*(float(one.double().norm()) for one in last[1].values())), 1e-30)
    )


def _relative(one: float, other: float) -> float:
    return abs(one - other) / max(abs(other), 1e-12)


def first_difference(
    found: Record,
    expected: Record,
    tolerance: float,
    what: tuple[str, ...] = ("parameters", "row", "gradients", "evaluation"),
) -> Difference | None:
    """The first step and number that differ by more than the tolerance; the tensor, if the tensors show it."""
    noise = _noise(expected)
    for step in sorted(expected.steps):
        if step not in found.steps:
            return Difference(step, "the record", "missing", f"{max(expected.steps)} steps")
        for difference in _differences(found.steps[step], expected.steps[step], tolerance, what):
            if difference[0].rpartition(" ")[2] not in noise:
                return Difference(step, *difference)
    return None


def _noise(record: Record) -> set[str]:
    """The parameters whose gradient may be nothing but rounding errors in some step."""
    found = set()
    for kept in record.steps.values():
        norms = {name: float(one.double().norm()) for name, one in kept.get("gradients", {}).items()}
        least = _NOISE * math.hypot(*norms.values()) if norms else 0.0
        found |= {name for name, norm in norms.items() if 0 < norm < least}
    return found


def _differences(
    found: Mapping[str, Any], expected: Mapping[str, Any], tolerance: float, what: tuple[str, ...]
) -> Iterator[tuple[str, str, str]]:
    order = ("row", "gradients", "parameters", "buffers", "evaluation")
    for kind in (one for one in order if one in what and one in expected and one in found):
        if kind in ("row", "evaluation"):
            yield from _numbers(found[kind], expected[kind], tolerance)
        else:
            yield from _tensors(found[kind], expected[kind], tolerance, kind.removesuffix("s"))


def _numbers(found: Mapping[str, Any], expected: Mapping[str, Any], tolerance: float) -> Iterator[tuple[str, str, str]]:
    of_models = ("evaluation_", "loss_", "grad_norm_", "lr_")
    compared = [key for key in expected if key in ("loss", "grad_norm", "lr") or key.startswith(of_models)]
    for key in compared:
        one, other = found.get(key), expected[key]
        if not isinstance(other, (int, float)):
            continue
        if one is None or not _close(float(one), float(other), tolerance):
            yield (
                f"the {key.replace('_', ' ').replace('grad norm', 'norm of the gradients')}",
                f"{one:.6g}" if isinstance(one, float) else f"{one}",
                f"{other:.6g}",
            )


def _close(one: float, other: float, tolerance: float) -> bool:
    return (
        abs(one - other) <= tolerance * max(abs(other), 1e-6) or (math.isnan(one) and math.isnan(other)) or one == other
    )


def _tensors(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float, kind: str
) -> Iterator[tuple[str, str, str]]:
    all_norms = math.sqrt(sum(float(one.double().norm()) ** 2 for one in expected.values() if one.numel()))
    for name, other in expected.items():
        one = found.get(name)
        if one is None or one.shape != other.shape:
            shape = None if one is None else tuple(one.shape)
            yield f"the shape of the {kind} {name}", f"{shape}", f"{tuple(other.shape)}"
            continue
        size = max(float(other.double().norm()), _NEGLIGIBLE * all_norms)
        distance = float((one.double() - other.double()).norm())
        if distance > tolerance * size or (
            math.isnan(distance) and not torch.equal(one.nan_to_num(), other.nan_to_num())
        ):
            norms = f"{float(one.double().norm()):.6g}", f"{float(other.double().norm()):.6g}"
            yield (
                f"the norm of the {kind} {name}",
                norms[0],
                f"{norms[1]} (the norm of the difference is {distance:.2g})",
            )
