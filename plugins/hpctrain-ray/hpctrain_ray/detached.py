"""The supervisor of a submitted job: a detached actor of Ray's, which lives on when `hpctrain submit` has ended."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from typing import Any

from hpctrain.toolkit.commands import (
    EXIT_CANCELLED,
    EXIT_DONE,
    EXIT_STOPPED,
    EXIT_TRAINING,
    EnvironmentUnfitError,
    UsageError,
)
from hpctrain_ray.connection import NAMESPACE
from hpctrain_ray.errors import first_line
from hpctrain_ray.ids import JobId, note_stop, read_end, was_stopped, write_end
from hpctrain_ray.order import Order
from hpctrain_ray.supervisor import Supervisor

OUTPUT = "ray.out"
"""The file of the run's directory with the ranks' output."""
_ANSWER = 30.0
"""Seconds for a supervisor to answer."""
_BEGIN = 120.0
"""Seconds for Ray to start a supervisor."""
_LEAVE = 0.5
"""Seconds between the end of a job and that of its actor, for an answer that is on its way."""


class DetachedSupervisor:
    """Runs an order in a thread, so that it answers meanwhile. Started anew by Ray after a loss, it goes on."""

    def __init__(self, id: str, order: Order) -> None:
        from hpctrain.api import open_regular  # it imports torch, for which asking about a job doesn't wait

        self._id = JobId.of(id)
        os.chdir(order.directory)  # a job may import what is beside it
        output = open_regular(self._id.directory / OUTPUT, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._output = open(output, "a", encoding="utf-8", buffering=1)  # noqa: SIM115  # as long as it lives
        self._supervisor = Supervisor(order, lambda rank, stream, text: self._write(text), self._say, repeats=True)
        threading.Thread(target=self._run, daemon=True).start()

    def _write(self, text: str) -> None:
        with suppress(OSError):  # a full disk must not end the training
            self._output.write(f"{text}\n")

    def _say(self, sentence: str) -> None:
        self._write(f"hpctrain: ray: {sentence}")

    def _run(self) -> None:
        import ray

        if (
            was_stopped(self._id) and read_end(self._id) is None
        ):  # it was being stopped when this process's predecessor was lost
            write_end(self._id, EXIT_CANCELLED)
        if read_end(self._id) is None:
            code, why = EXIT_TRAINING, ""
            try:
                code = self._supervisor.run()
                why = self._supervisor.error if code not in (EXIT_DONE, EXIT_STOPPED, EXIT_CANCELLED) else ""
                if code == EXIT_STOPPED and self._supervisor.was_stopped:
                    code = EXIT_CANCELLED  # ranks that were starting may not have seen the mark of `hpctrain cancel`
            except (EnvironmentUnfitError, UsageError) as error:
                code, why = error.exit_code, str(error)
            except Exception as error:
                why = f"the supervisor failed: {first_line(error)}"
            if why and why != self._supervisor.error:
                self._say(why)
            with suppress(OSError):
                write_end(self._id, code, why)
        time.sleep(_LEAVE)
        ray.kill(ray.get_runtime_context().current_actor)

    def look(self) -> tuple[str, str]:
        """The state's word and detail."""
        return self._supervisor.state, self._supervisor.detail

    def stop(self) -> None:
        """Let the ranks save and end."""
        note_stop(self._id)
        self._supervisor.stop()


def start_detached(order: Order, id: JobId) -> None:
    """Start the supervisor of a job on the cluster of this process. Raises EnvironmentUnfitError."""
    import ray

    actor: Any = ray.remote(DetachedSupervisor)
    options = {"name": id.name, "namespace": NAMESPACE, "lifetime": "detached", "num_cpus": 0, "max_restarts": -1}
    made = actor.options(**options).remote(str(id), order)
    try:
        ray.get(made.look.remote(), timeout=_BEGIN)
    except (ray.exceptions.RayError, TimeoutError) as error:
        ray.kill(made)
        raise EnvironmentUnfitError(
            f"the supervisor of the job did not start on the Ray cluster within {_BEGIN:.0f} s ({first_line(error)}); expected "
            f"hpctrain-ray and the directory {id.directory} on its nodes"
        ) from None


def find_detached(id: JobId) -> Any | None:
    """The supervisor of a job; None if the cluster has none by this name: the job has ended, or the cluster is another one."""
    import ray

    try:
        return ray.get_actor(id.name, namespace=NAMESPACE)
    except ValueError:
        return None


def ask_detached(actor: Any, method: str) -> Any | None:
    """The answer of a supervisor; None if it has ended meanwhile. Raises EnvironmentUnfitError if it does not answer."""
    import ray

    try:
        return ray.get(getattr(actor, method).remote(), timeout=_ANSWER)
    except ray.exceptions.ActorUnavailableError as error:
        raise EnvironmentUnfitError(
            f"the job's supervisor on the Ray cluster is being started again ({first_line(error)}); ask again in a minute"
        ) from None
    except ray.exceptions.RayActorError:
        return None
    except (ray.exceptions.RayError, TimeoutError) as error:
        raise EnvironmentUnfitError(
            f"the job's supervisor on the Ray cluster did not answer within {_ANSWER:.0f} s ({first_line(error)}); ask again"
        ) from None
