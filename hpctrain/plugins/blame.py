"""Finds out whose code raised an error."""

from __future__ import annotations

from types import TracebackType

from hpctrain.plugins.registry import Registry


def raised_in(error: BaseException, registry: Registry) -> str:
    """A sentence that says what was raised, by which plugin, and in which of its methods."""
    said = f"raised {type(error).__name__}" + (f": {error}" if str(error) else "")
    who = blamed(error, registry)
    return f"the plugin {said}" if who is None else f"the plugin {who[0]} {said} in {who[1]}"


def blamed(error: BaseException, registry: Registry) -> tuple[str, str] | None:
    """The plugin whose code was called last before the error was raised, and the method; None where no plugin's was.

    A plugin's code is all that its distribution's package holds.
    """
    found, before, trace = None, None, error.__traceback__
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__", ""))
        source = next((one for one in registry.sources if _holds(one.module, module)), None)
        if source is not None and before is None:
            found = str(source), _method(trace)
        before, trace = source, trace.tb_next
    return found


def _holds(plugin: str, module: str) -> bool:
    package = plugin.rpartition(".")[0]
    return module == plugin or module.startswith(f"{plugin}.") or bool(package and module.startswith(f"{package}."))


def _method(trace: TracebackType) -> str:
    code = trace.tb_frame.f_code
    return str(getattr(code, "co_qualname", code.co_name))  # Python 3.11 has the class, too
