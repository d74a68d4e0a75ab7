"""What hpctrain uses of torch that has no public name. No other file of hpctrain or its plugins uses such a name.

Torch may change these without notice, so this is the file to read when hpctrain meets a new version of it. Every name was
checked with torch 2.13.0, 2.14.1 and 2.15.0; a comment says where the versions differ. tests/unit/test_torch_private.py
says whether the installed torch has them all.

It imports torch only: hpctrain.mpi, which stands alone, uses it. hpctrain.api has what plugins need. The slow imports are
made where they are needed, since `import hpctrain.mpi` needs none of them.
"""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# The options of an all-gather, which torch.distributed exports for every other collective.
# HashStore is documented as torch.distributed.HashStore, which torch's own types lack.
from torch._C._distributed_c10d import AllgatherOptions as AllgatherOptions
from torch._C._distributed_c10d import HashStore as HashStore

# The output of a functional collective that has not been waited for: hpctrain.mpi waits for what is one of these.
from torch.distributed._functional_collectives import AsyncCollectiveTensor as AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh

# Selective activation checkpointing looks at each operator that is computed again. torch documents this class under this name.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

DisableTorchDispatch = torch._C._DisableTorchDispatch
"""A context in which torch's arithmetic passes by the caller's dispatch modes: that of a collective is none of their business."""

get_layout = torch.serialization._get_layout
"""What the pickle of a torch.layout names as its constructor: a lookup in a table, which `hpctrain.world.objects` lets through."""


class PythonGroup(dist.ProcessGroup):
    """A process group on the CPU whose operations are methods in Python."""

    def __init__(self, rank: int, size: int) -> None:
        make: Any = super().__init__  # the types of torch 2.13 and 2.14 lack the arguments
        make(rank, size)

    def _get_backend(self, device: torch.device) -> Any:
        """Of which torch asks what it can do: `supports_coalescing`, in torch.distributed.batch_isend_irecv since 2.14.

        A group has a backend for each device in C++; this one is its own.
        """
        return self if device.type == "cpu" else super()._get_backend(device)

    # torch's Python code calls all_gather_single and reduce_scatter_single, its C++ code these.

    def _allgather_base(self, *args: Any) -> Any:
        return self.all_gather_single(*args)

    def _reduce_scatter_base(self, *args: Any) -> Any:
        return self.reduce_scatter_single(*args)


class PythonMessageWork(dist.Work):
    """The handle of a send or receive in Python; `source_rank` says from which rank of the group the message came."""

    def _source_rank(self) -> int:
        """What torch.distributed.recv asks where its caller takes a message of any rank."""
        return self.source_rank()


def set_object_unpickler(kind: type[pickle.Unpickler]) -> None:
    """The class that reads what torch's object collectives receive: DCP and pipelines use these, and a pickle runs code."""
    from torch.distributed import distributed_c10d

    distributed_c10d._unpickler = kind


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """One axis of several, over the same ranks: a group of two data axes."""
    return mesh._flatten(name)


def clear_sharding_cache() -> None:
    """DTensor remembers groups by name; the next job of this process gives the names to others."""
    asked = getattr(torch._C, "_get_DTensor_sharding_propagator_cache_stats", None)
    if asked is not None and not any(asked()):
        return  # nothing was cut; what follows takes a slow import
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()


def strided_parts(placement: Placement, dim: int) -> int | None:
    """How many parts of axes behind it a placement cuts `dim` after; None for what isn't such a placement of `dim`.

    fully_shard makes these of parameters that tensor parallelism has cut along the same dim.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    if isinstance(placement, _StridedShard) and placement.dim == dim:
        return int(placement.split_factor)
    return None


def storage_record() -> type:
    """The class of the records in DCP's table of contents that say where a part lies in its file."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo


# Modules: named_children and named_buffers leave out what is None, and give what stands in several places once.


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The module's own dict of its children; changes to it are changes of the module."""
    return module._modules


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The module's own dict of its buffers; changes to it are changes of the module."""
    return module._buffers


def convert_tensors(module: nn.Module, convert: Callable[[Tensor], Tensor]) -> None:
    """Replace every parameter, gradient and buffer; Module.to, which does it so, would drop imaginary parts."""
    module._apply(convert)


# Tensors.


def version_of(tensor: Tensor) -> int:
    """How often the tensor was changed in place: a recomputed block is to begin with the buffers that it began with."""
    return tensor._version


def is_view(tensor: Tensor) -> bool:
    """Whether autograd knows it as a view: a zero-bubble schedule detaches in place what a stage gives, and a view can't be."""
    return tensor._is_view()


def move_local(tensor: DTensor, values: Tensor) -> None:
    """The values of this rank's part lie in `values` from now on; `to_local()` of a parameter gives a tensor of its own."""
    tensor._local_tensor.data = values


def sparse_nbytes(tensor: Tensor) -> int:
    """The bytes of a sparse COO tensor; `values()` and `indices()` refuse one that isn't coalesced."""
    return tensor._values().nbytes + tensor._indices().nbytes


# Operators on many tensors at once, as torch's optimizers use them: one launch on a GPU instead of one for each.


def foreach_copy_(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into its target."""
    torch._foreach_copy_(targets, sources)


def foreach_mul_(tensors: list[Tensor], factor: float) -> None:
    """Multiply each in place."""
    torch._foreach_mul_(tensors, factor)


def foreach_norm(tensors: list[Tensor]) -> Sequence[Tensor]:
    """The 2-norm of each."""
    return torch._foreach_norm(tensors)


# Operators one by one.


def is_mutable(operator: Any) -> bool:
    """Whether the operator, as a dispatch mode gets it, writes into one of its arguments."""
    return bool(operator._schema.is_mutable)


def cpu_flash_attention(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp of each row, which ring attention merges; the public function returns no log-sum-exp."""
    made: tuple[Tensor, Tensor]
    made = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal)
    return made


def cpu_flash_attention_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, rows: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, where `output` and `rows` (log-sum-exp) may be those over more keys than `key`."""
    made: tuple[Tensor, Tensor, Tensor]
    made = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, key, value, output, rows, 0.0, causal
    )
    return made


class LateCompiler(ModuleType):
    """Stands for torch._dynamo until something of it is needed.

    torch imports its compiler, two seconds of processor time, when the first function is called that the compiler must leave
    alone: `torch.optim.Optimizer` has some, and so has everything that is built on the meta device. Where nothing is compiled,
    such a function may be called as it is.
    """

    def __init__(self) -> None:
        super().__init__("torch._dynamo")
        self.left_alone: list[Any] = []
        # asked for whenever a process group is made, to forget what the compiler knows of it
        self.trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)

    def disable(self, fn: Any, recursive: bool = True, *, wrapping: bool = True) -> Any:
        """What torch._compile._disable_dynamo calls instead of a function that the compiler must leave alone."""
        self.left_alone.append(fn)
        return fn

    def graph_break(self) -> None:
        """Called around the step of every optimizer, where nothing is compiled now."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # who looks through all modules needs none of it
            raise AttributeError(name)
        return getattr(self.load(), name)

    def load(self) -> ModuleType:
        """The compiler itself, in the place of this."""
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
            for fn in self.left_alone:  # torch asks anew what to call instead
                if hasattr(fn, "__dynamo_disable"):
                    delattr(fn, "__dynamo_disable")
            self.left_alone.clear()
        return importlib.import_module(self.__name__)


def delay_compiler() -> None:
    """Let torch import its compiler when something is compiled, and not before."""
    if "torch._dynamo" not in sys.modules:
        late: Any = LateCompiler()
        sys.modules["torch._dynamo"] = torch._dynamo = late
