"""Shows the plugins what another terminal asks of the running job."""

from __future__ import annotations

from typing import Any

from hpctrain.contracts.life_cycle import Request
from hpctrain.model.conformance.hooks import weights_kept
from hpctrain.ranks.json_collectives import broadcast_value
from hpctrain.training.session import Session


def take_request(session: Session) -> None:
    """Take the oldest request of rank 0's, on all ranks. Collective."""
    queries, hooks = session.queries, session.hooks
    question = None if queries is None else queries.take()
    found = broadcast_value(None if question is None else [question.name, dict(question.values)])
    if found is None:  # it was withdrawn meanwhile
        return

    def answer(told: dict[str, Any]) -> None:
        if queries is not None and question is not None:
            queries.tell(question, told)

    name, values = found
    request, step = Request(name, values, answer), session.progress.step
    with weights_kept(session.model, "hpctrain_request", hooks.who("hpctrain_request")):
        taken = hooks.call("hpctrain_request", request=request, step=step, model=session.model)
    if not any(taken):
        answer({"state": "refused", "why": f"no plugin of this job takes a request for {name!r}"})
