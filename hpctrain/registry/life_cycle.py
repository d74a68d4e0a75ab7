"""Calls the life-cycle hooks. The error of a plugin is reported with the plugin's name."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, NoReturn

import pluggy

from hpctrain.base.errors import HpctrainError, TrainingError, UsageError
from hpctrain.contracts.identity import Identity
from hpctrain.contracts.life_cycle import Hook, Profiler
from hpctrain.contracts.model import Batch
from hpctrain.contracts.plugin import broken
from hpctrain.ranks.json_collectives import gather_values
from hpctrain.ranks.watchdog.position import Position
from hpctrain.registry.blame import raised, raised_in
from hpctrain.registry.discovery import register
from hpctrain.registry.registry import Registry

LOG = logging.getLogger("hpctrain")


class LifeCycle:
    """The hooks of one job's plugins."""

    def __init__(
        self, registry: Registry, identity: Identity, hooks: Sequence[Hook], profiler: Profiler | None = None
    ) -> None:
        """hooks: the hooks that the job turns on; they start here, and so does the profiler."""
        self.position = Position()
        """This rank's position in the training."""
        self._manager, self._hooks = registry.manager, registry.manager.hook
        self._here = f", on rank {identity.rank} on {identity.node}" if identity.size > 1 else ""
        self._sources = {source.key: str(source) for source in registry.sources}
        # steps of this run so far; parts that join later, and after which step
        self._steps, self._later = 0, list[tuple[int, object]]()
        # numbered, since pluggy wants different names
        chosen = [(f"[[hook]] {number}", "hook", hook) for number, hook in enumerate(hooks)]
        chosen += [] if profiler is None else [("[profile]", "profile", profiler)]
        self._chosen = [hook for _, _, hook in chosen]
        self._started = [self._start(registry, *hook) for hook in chosen]
        self._look()

    def _look(self) -> None:
        """Note which hooks anything implements: the others cost nothing."""
        self._watches_phases = any(self._implementations("hpctrain_phase_begin", "hpctrain_phase_end"))
        self._sees_outputs = bool(self._implementations("hpctrain_outputs"))
        ending = self._implementations("hpctrain_job_start", "hpctrain_step_end", "hpctrain_evaluation")
        self.can_end = any("control" in hook.argnames for hook in ending)
        """Whether any plugin takes a Control, which lets it end the run."""

    def _start(self, registry: Registry, place: str, slot: str, hook: Hook) -> object:
        """Start a hook and register what it returned. place: the hook's table in the job."""
        key = f"{place} {hook.name}"
        self._sources[key] = f"{hook.name} of {registry.find(slot, hook.name).source}"
        try:
            started = hook.start()
        except HpctrainError:
            raise
        except Exception as error:
            LOG.info("a plugin failed", exc_info=error)
            raise TrainingError(raised_in(error, registry)) from error
        fault = register(self._manager, started, key)
        if fault is not None:
            raise UsageError(f"{place.partition(' ')[0]} name = {hook.name!r}: {fault}")
        return started

    def refuse_differences(self) -> None:
        """Raise ContractError on all ranks if a hook has started with other life-cycle hooks on another rank. Collective."""
        hooks = [sorted(caller.name for caller in self._manager.get_hookcallers(part) or ()) for part in self._started]
        if not hooks:
            return  # a job without hooks: it is the same on all ranks
        for rank, theirs in enumerate(everyone := gather_values(hooks)):
            for hook, first, other in zip(self._chosen, everyone[0], theirs, strict=True):
                if first != other:
                    fault = f"started with {', '.join(other)} on rank {rank} and {', '.join(first)} on rank 0"
                    raise broken(hook, fault, "the same hooks on all ranks: some of them communicate")

    def close(self) -> None:
        """Call the hooks of this run no more."""
        for started in self._started:
            self._manager.unregister(started)

    def join(self, part: object, after: int = 0) -> None:
        """Call the hooks of `part`, too, from now on or `after` this many more steps."""
        if after > 0:
            self._later.append((self._steps + after, part))
            return
        key = f"{type(part).__module__}.{type(part).__qualname__} {id(part)}"  # several of a class may join
        self._sources[key] = key.partition(" ")[0]
        fault = register(self._manager, part, key)
        if fault is not None:
            raise TypeError(f"{type(part).__qualname__} can't join the run: {fault}")
        self._started.append(part)
        self._look()

    def step_done(self) -> None:
        """Count a step, and let those join that have waited for it."""
        self._steps += 1
        due = [part for step, part in self._later if step <= self._steps]
        self._later = [(step, part) for step, part in self._later if step > self._steps]
        for part in due:
            self.join(part)

    def leave(self, part: object) -> None:
        """Call the hooks of `part` no more."""
        self._manager.unregister(part)
        self._started.remove(part)
        self._look()

    def busy(self, doing: str) -> None:
        """Tell the watchdog what this rank does."""
        self.position.move(doing)

    def _implementations(self, *hooks: str) -> list[pluggy.HookImpl]:
        return [implementation for hook in hooks for implementation in getattr(self._hooks, hook).get_hookimpls()]

    def call(self, hook: str, **arguments: Any) -> list[Any]:
        """The results of the implementations, without None. Any error becomes a TrainingError with the plugin's name, except
        an HpctrainError, which is raised unchanged."""
        caller, model = getattr(self._hooks, hook), arguments.get("model")
        module = None if model is None or not model.module.training else model.module
        try:
            results: list[Any] = caller(**arguments)
            if module is not None and not module.training:
                self._refuse_evaluation_mode(hook, caller)
            return results
        except HpctrainError:
            raise
        except Exception as error:
            LOG.info("a plugin failed in %s", hook, exc_info=True)
            frames, who = self._where(caller, error.__traceback__)
            raise TrainingError(f"{who} {raised(error)} in {hook}{self._here}\n{frames}".rstrip()) from error

    def phase(self, name: str, step: int) -> AbstractContextManager[None]:
        """The context of a phase of `step`, counted from 0."""
        return self._phase(name, step) if self._watches_phases else self.position.inside(name, step)

    def forwarded(self, step: int, outputs: Any, batch: Batch) -> None:
        """Show plugins the outputs of a forward. Costs nothing if none implements the hook."""
        if self._sees_outputs:
            self.call("hpctrain_outputs", step=step, outputs=outputs, batch=batch)

    @contextmanager
    def _phase(self, name: str, step: int) -> Iterator[None]:
        self.call("hpctrain_phase_begin", phase=name, step=step)
        with self.position.inside(name, step):
            yield
        self.call("hpctrain_phase_end", phase=name, step=step)

    def _refuse_evaluation_mode(self, hook: str, caller: pluggy.HookCaller) -> NoReturn:
        """Raise TrainingError that names every plugin that may have left the model in evaluation mode."""
        names = [self._sources.get(impl.plugin_name, impl.plugin_name) for impl in caller.get_hookimpls()]
        raise TrainingError(
            f"the plugin {' or '.join(names)} left the model in evaluation mode in {hook}{self._here}, where dropout and batch "
            "norms do not train; expected module.train() again at its end"
        )

    def _where(self, caller: pluggy.HookCaller, trace: TracebackType | None) -> tuple[str, str]:
        """The frames from the failed implementation on, and its plugin."""
        names = {getattr(impl.function, "__code__", None): impl.plugin_name for impl in caller.get_hookimpls()}
        while trace is not None and trace.tb_frame.f_code not in names:  # pluggy's own frames come first
            trace = trace.tb_next
        if trace is None:  # an implementation without a code of its own, such as a functools.partial
            return "", "a plugin"
        name = names[trace.tb_frame.f_code]
        return "".join(traceback.format_tb(trace)), f"the plugin {self._sources.get(name, name)}"
