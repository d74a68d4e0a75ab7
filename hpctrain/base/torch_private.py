"""Private names of torch. Besides this file, torch_groups.py and torch_attention.py use some, and of the tools
plan/torch_fake.py.

torch may change these names without notice, so read this file first when a new torch version fails. Every name was checked
with torch 2.13.0, 2.14.1 and 2.15.0; comments mark differences between them. tests/unit/test_torch_private.py checks that
the installed torch has them all.

The file imports only torch, because the standalone hpctrain.mpi uses it. Plugins get what they need from hpctrain.api. Slow
imports are made inside functions, because `import hpctrain.mpi` needs none of them.
"""

from __future__ import annotations

import copy
import importlib
import json
import pickle
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

# Selective activation checkpointing looks at each operator that is computed again. torch documents this class under this name.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

__all__ = ["foreach_copy_"]

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement
    from torch.utils.data import DataLoader

P = ParamSpec("P")
T = TypeVar("T")

DisableTorchDispatch = torch._C._DisableTorchDispatch
"""A context in which torch's operators bypass the caller's dispatch modes, which must not see a collective's arithmetic."""

get_layout = torch.serialization._get_layout
"""The constructor in the pickle of a torch.layout: a table lookup, which `hpctrain.ranks.restricted_pickle` allows."""


def set_object_unpickler(kind: type[pickle.Unpickler]) -> None:
    """Replace the unpickler of torch's object collectives, which DCP and pipelines use: a pickle can run code."""
    from torch.distributed import distributed_c10d

    distributed_c10d._unpickler = kind


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Merge several axes into one over the same ranks, for a group over two data axes."""
    return mesh._flatten(name)


def joint_mesh(mesh: DeviceMesh, *axes: str) -> DeviceMesh:
    """The mesh of an axis, as `Parallelism.apply` gets it, and of those of `axes` that the job has, the outermost first."""
    root, wanted = mesh._get_root_mesh(), {*(mesh.mesh_dim_names or ()), *axes}
    return root[tuple(axis for axis in root.mesh_dim_names or () if axis in wanted)]


def communicate_by_dtype(unit: nn.Module, gather: Any, sums: Callable[[], Any]) -> None:
    """Cut what fully_shard gathers and sums at once for a unit into a group for each dtype: it sums gradients of one dtype only.

    To be called before the first forward. torch itself makes groups where parameters have several process groups. gather: what
    gathers in place of torch's, or None. sums: makes what sums a group.
    """
    groups = unit._get_fsdp_state()._fsdp_param_groups  # type: ignore[operator]
    for group in list(groups):
        kinds: dict[torch.dtype, list[Any]] = {}
        for one in group.fsdp_params:
            kinds.setdefault(one.sharded_param.dtype, []).append(one)
        first, *others = kinds.values()
        group.fsdp_params = first
        for held in others:
            groups.append(copy.copy(group))
            groups[-1].fsdp_params, groups[-1]._post_forward_indices = held, []
            groups[-1]._module_to_pre_save_state_dict_hook_handle = {}
            groups[-1]._module_to_pre_load_state_dict_hook_handle = {}
    for group in groups:
        group._all_gather_comm = gather or group._all_gather_comm
        group._reduce_scatter_comm = sums()


def clear_sharding_cache(device: torch.device) -> None:
    """Clear DTensor's cache, which remembers groups by name: the next job of this process reuses the names.

    device: of this rank. Each thread has a cache of its own, and torch computes gradients of an accelerator on another thread.
    """
    asked = getattr(torch._C, "_get_DTensor_sharding_propagator_cache_stats", None)
    if asked is not None and not any(asked()):
        return  # no DTensor was used; the rest needs a slow import
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    if device.type != "cpu":
        with torch.inference_mode(False), torch.enable_grad():
            product = torch.ones((), device=device, requires_grad=True) * 1.0
            product.register_hook(lambda _: _clear_sharding_prop_cache())
            product.backward()


def strided_parts(placement: Placement, dim: int) -> int | None:
    """The number of parts into which inner axes cut `dim` before this placement does; None for other placements.

    fully_shard makes such placements for parameters that tensor parallelism has cut along the same dim.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    if isinstance(placement, _StridedShard) and placement.dim == dim:
        return int(placement.split_factor)
    return None


def storage_record() -> type:
    """The class of the records in DCP's table of contents that give the place of a part in its file."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo


# Modules: named_children and named_buffers skip None, and return shared entries only once.


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The module's own dict of its children; changes to it change the module."""
    return module._modules


MODULE_CALL = nn.Module._call_impl.__code__
"""The code of a module's call, whose frame has `self`, `args` and `kwargs`."""


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The module's own dict of its buffers; changes to it change the module."""
    return module._buffers


def convert_tensors(module: nn.Module, convert: Callable[[Tensor], Tensor]) -> None:
    """Replace every parameter, gradient and buffer, as Module.to does, but Module.to would drop imaginary parts."""
    module._apply(convert)


# Tensors.


def tensor_without_memory(kind: type[Tensor], like: Tensor) -> Any:
    """A tensor of a subclass, which decides what operators do with it."""
    return Tensor._make_wrapper_subclass(kind, like.shape, dtype=like.dtype, device=like.device)


def version_of(tensor: Tensor) -> int:
    """The number of in-place changes of the tensor: a recomputed block must start with the buffers of its first run."""
    return tensor._version


def is_view(tensor: Tensor) -> bool:
    """Whether autograd sees a view: a zero-bubble schedule detaches a stage's output in place, which fails for views."""
    return tensor._is_view()


def move_local(tensor: DTensor, values: Tensor) -> None:
    """Make `values` the memory of this rank's part. For a parameter, `to_local()` returns a new tensor object."""
    tensor._local_tensor.data = values


# Operators on many tensors at once, as torch's optimizers use them: one launch on a GPU instead of one per tensor.


foreach_copy_, foreach_add_, foreach_mul_ = torch._foreach_copy_, torch._foreach_add_, torch._foreach_mul_
"""The first list's tensors become the second's, or grow by these, or are multiplied by a number."""
foreach_norm = torch._foreach_norm
"""The 2-norm of each."""


def is_compiled_module(module: nn.Module) -> bool:
    """Whether torch.compile has made the module, its forward or its call."""
    forward = getattr(module, "forward", None)
    made = type(module).__name__ == "OptimizedModule" or hasattr(forward, "_torchdynamo_orig_callable")
    return made or getattr(module, "_compiled_call_impl", None) is not None


def end_workers(loader: DataLoader[Any]) -> None:
    """End the worker processes of a DataLoader with persistent_workers, which otherwise wait for the garbage collector."""
    workers: Any = loader._iterator
    if workers is not None:
        workers._shutdown_workers()
        # a queue's thread frees semaphores, which would count as leaked if the process ended first
        threads = (queue._thread for queue in workers._index_queues)
        for thread in filter(None, threads):
            thread.join(timeout=1)
        loader._iterator = None


def hide_worker() -> None:
    """Make `get_worker_info` say that this process is no worker of a DataLoader: a stream that asks it for its share of the
    items would leave some out."""
    from torch.utils.data._utils import worker

    worker._worker_info = None


def is_mutable(operator: Any) -> bool:
    """Whether the operator, as a dispatch mode gets it, writes into one of its arguments."""
    return bool(operator._schema.is_mutable)


def recorded_operations() -> list[dict[str, Any]]:
    """torch's flight recorders: the operations of NCCL and of gloo that this process has not seen end, each oldest first."""
    recorder: Any = torch._C._distributed_c10d
    dumps = [recorder._dump_fr_trace_json]
    if hasattr(recorder, "_dump_nccl_trace_json"):  # in builds for GPUs only
        dumps.insert(0, recorder._dump_nccl_trace_json)
    return [entry for dump in dumps for entry in json.loads(dump(True, True)).get("entries", [])]


def is_profiling() -> bool:
    """Whether a profiler of torch's is at work in this process: a second one would end it."""
    return bool(torch._C._autograd._profiler_enabled())


def profiler_settings() -> Any:
    """torch.profiler's settings for an accelerator: with the events of synchronization, which a critical path needs."""
    return torch._C._profiler._ExperimentalConfig(enable_cuda_sync_events=True)


class MemoryHistory:
    """Who takes and gives back memory of an accelerator, with the stacks in Python."""

    def __init__(self, device: torch.device) -> None:
        self.memory: Any = getattr(torch.get_device_module(device), "memory", None)
        self.is_kept = device.type != "cpu" and hasattr(self.memory, "_record_memory_history")
        """Whether torch keeps any for this kind of device."""

    def begin(self, most: int) -> None:
        """Record from now on; keep so many of the newest events."""
        self.memory._record_memory_history(stacks="python", max_entries=most)

    def write(self, path: str) -> None:
        """Write a file that pytorch.org/memory_viz shows."""
        self.memory._dump_snapshot(path)

    def end(self) -> None:
        """Record no more."""
        self.memory._record_memory_history(enabled=None)


class LateCompiler(ModuleType):
    """A stand-in for torch._dynamo until it is needed.

    Importing the compiler takes two seconds of processor time. torch does it at the first call of a function that the compiler
    must leave alone: `torch.optim.Optimizer` has such functions, and building on the meta device calls some. As long as
    nothing is compiled, such a function may be called directly.
    """

    def __init__(self) -> None:
        super().__init__("torch._dynamo")
        self.left_alone: list[Any] = []
        # called whenever a process group is made, to clear the compiler's cache
        self.trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)

    def disable(self, fn: Any = None, recursive: bool = True, *, wrapping: bool = True, **reason: Any) -> Any:
        """torch._compile._disable_dynamo calls this, without `wrapping`, for a function that the compiler must leave alone.

        torch.compiler.disable calls it, too. Its callers keep what is returned, so that must come from the compiler itself.
        """
        if wrapping:
            return self.load().disable(fn, recursive, **reason)
        self.left_alone.append(fn)
        return fn

    def graph_break(self) -> None:
        """Called around the step of every optimizer; nothing is compiled yet."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # code that scans all modules must not load the compiler
            raise AttributeError(name)
        return getattr(self.load(), name)

    def load(self) -> ModuleType:
        """Load the compiler in place of this stand-in."""
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
            for fn in self.left_alone:  # torch must look up the wrapped function again
                if hasattr(fn, "__dynamo_disable"):
                    delattr(fn, "__dynamo_disable")
            self.left_alone.clear()
        return importlib.import_module(self.__name__)


def uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """Keep `[compile]` out of a function: graphs end before it and begin again after it.

    A decorator, in place of `torch.compiler.disable`, which loads the compiler at once: two seconds of each command.
    """
    decorate: Any = torch._disable_dynamo  # type: ignore[attr-defined]
    decorated: Callable[P, T] = decorate(function)
    return decorated


def delay_compiler() -> None:
    """Delay torch's import of its compiler until something is compiled."""
    if "torch._dynamo" not in sys.modules:
        late: Any = LateCompiler()
        sys.modules["torch._dynamo"] = torch._dynamo = late


def load_kernels(content: bytes) -> bool:
    """Give the compiler what `torch.compiler.save_cache_artifacts` has made; whether this torch can use it."""
    late: Any = sys.modules.get("torch._dynamo")
    if isinstance(late, LateCompiler):
        late.load()  # the content names modules of the compiler
    else:
        importlib.import_module("torch._dynamo")
    return torch.compiler.load_cache_artifacts(content) is not None


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has a shape and no values."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def operator_of(overload: Any) -> tuple[Any, str]:
    """The operator of an overload, as torch.utils.flop_counter lists it, and its name."""
    return overload._overloadpacket, str(overload._opname)
