"""Ends a run whose loss has been below a limit, given in the environment, for three steps. Checkpoints have the count."""

from __future__ import annotations

import os

from hpctrain.api import PluginState, hookimpl

_seen = {"below": 0}


@hookimpl
def hpctrain_state():
    return PluginState("acme-patience", values=lambda: dict(_seen), restore=_seen.update)


@hookimpl
def hpctrain_step_end(metrics, control):
    limit = float(os.environ.get("ACME_LIMIT", "-inf"))
    _seen["below"] = _seen["below"] + 1 if metrics["loss"] < limit else 0
    metrics["below"] = _seen["below"]
    if _seen["below"] == 3:
        control.stop(f"the loss was below {limit:g} for 3 steps")
