"""torch's private names are used in four files only, and the installed torch has them."""

from __future__ import annotations

import ast
import functools
import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sources import sources
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_param_group, _fsdp_state
from torch.distributed.tensor import DTensor, _sharding_prop

import hpctrain.api
from hpctrain.base import torch_groups, torch_private

ROOT = Path(__file__).parent.parent.parent
HOMES = [
    *(ROOT / "hpctrain" / "base" / name for name in ("torch_private.py", "torch_groups.py", "torch_attention.py")),
    ROOT / "plugins" / "hpctrain_tools" / "plan" / "torch_fake.py",
]


def param_group() -> Any:
    """A group of parameters as fully_shard makes it for each unit, here empty."""
    policies = MixedPrecisionPolicy(), OffloadPolicy()
    return _fsdp_param_group.FSDPParamGroup([], (), Any, None, torch.device("cpu"), None, *policies)


OWNERS: dict[str, Any] = {
    "_all_gather_comm": lambda: param_group(),
    "_fsdp_param_groups": lambda: _fsdp_state.FSDPState(),
    "_get_fsdp_state": FSDPModule,
    "_make_wrapper_subclass": torch.Tensor,
    "_module_to_pre_load_state_dict_hook_handle": lambda: param_group(),
    "_module_to_pre_save_state_dict_hook_handle": lambda: param_group(),
    "_post_forward_indices": lambda: param_group(),
    "_reduce_scatter_comm": lambda: param_group(),
    "_ExcludeDispatchKeyGuard": torch._C,
    "_acc": torch._C,
    "_c10d_functional": torch.ops,
    "_cdata": torch.UntypedStorage,
    "_dispatch_get_registrations_for_dispatch_key": torch._C,
    "_foreach_supported_types": "torch.optim.optimizer",
    "_get_privateuse1_backend_name": torch._C,
    "_pin_memory": torch.ops.aten,
    "_scaled_dot_product_attention_math": torch.ops.aten,
    "_setup_privateuseone_for_python_backend": "torch.utils.backend_registration",
    "_disable_current_modes": "torch.utils._python_dispatch",
    "_local_scalar_dense": torch.ops.aten,
    "_opname": torch.ops.aten.add.Tensor,
    "_overloadpacket": torch.ops.aten.add.Tensor,
    "_resolve_process_group": "torch._C._distributed_c10d",
    "_DisableTorchDispatch": "torch._C",
    "_StorageInfo": "torch.distributed.checkpoint.filesystem",
    "_StridedShard": "torch.distributed.tensor.placement_types",
    "_allgather_base": dist.ProcessGroup,
    "_apply": nn.Module,
    "_buffers": nn.Module(),
    "_call_impl": nn.Module,
    "_clear_sharding_prop_cache": "torch.distributed.tensor.debug",
    "_compiled_call_impl": nn.Module,
    "_distributed_c10d": torch._C,
    "_dump_fr_trace_json": "torch._C._distributed_c10d",
    "_dump_nccl_trace_json": "torch._C._distributed_c10d",
    "_disable_dynamo": torch,
    "_dynamo": torch,
    "_flatten": DeviceMesh,
    "_get_root_mesh": DeviceMesh,
    "_foreach_copy_": torch,
    "_foreach_mul_": torch,
    "_foreach_norm": torch,
    "_foreach_add_": torch,
    "_fused_sdp_choice": torch,
    "_get_DTensor_sharding_propagator_cache_stats": torch._C,
    "_get_backend": dist.ProcessGroup,
    "_get_layout": torch.serialization,
    "_index_queues": lambda: iter(torch.utils.data.DataLoader([0], num_workers=1)),
    "_is_view": torch.Tensor,
    "_iterator": torch.utils.data.DataLoader([]),
    "_local_tensor": DTensor,
    "_modules": nn.Module(),
    "_plugins": dist.Backend,
    "_reduce_scatter_base": dist.ProcessGroup,
    "_register_backend": dist.ProcessGroup,
    "_scaled_dot_product_cudnn_attention": torch.ops.aten,
    "_scaled_dot_product_cudnn_attention_backward": torch.ops.aten,
    "_scaled_dot_product_efficient_attention": torch.ops.aten,
    "_scaled_dot_product_efficient_attention_backward": torch.ops.aten,
    "_scaled_dot_product_flash_attention": torch.ops.aten,
    "_scaled_dot_product_flash_attention_backward": torch.ops.aten,
    "_scaled_dot_product_flash_attention_for_cpu": torch.ops.aten,
    "_scaled_dot_product_flash_attention_for_cpu_backward": torch.ops.aten,
    "_schema": torch.ops.aten.mm.default,
    "_set_default_backend": dist.ProcessGroup,
    "_set_group_desc": dist.ProcessGroup,
    "_set_group_name": dist.ProcessGroup,
    "_set_sequence_number_for_group": dist.ProcessGroupGloo,
    "_shutdown_workers": torch.utils.data.dataloader._MultiProcessingDataLoaderIter,
    "_source_rank": dist.Work,
    "_thread": torch.multiprocessing.get_context().Queue(),
    "_unpickler": "torch.distributed.distributed_c10d",
    "_ExperimentalConfig": "torch._C._profiler",
    "_dump_snapshot": "torch.cuda.memory",
    "_autograd": "torch._C",
    "_profiler": "torch._C",
    "_profiler_enabled": "torch._C._autograd",
    "_propagate_tensor_meta_non_cached": _sharding_prop.ShardingPropagator,
    "_record_memory_history": "torch.cuda.memory",
    "_torchdynamo_orig_callable": lambda: torch.compile(nn.Linear(1, 1).forward, backend="eager"),
    "_version": torch.Tensor,
    "_worker_info": "torch.utils.data._utils.worker",
}
"""Where torch has the private attributes that torch_private.py uses: a module's name, an object, or a function that makes one."""

OF_NCCL = {"_dump_nccl_trace_json"}
"""Those that only builds with NCCL have."""

OTHERS = (
    "os._exit",
    "threading._shutdown",
    "atexit._run_exitfuncs",
    "sys._current_frames",
    "model._supports_attention_backend",
    "config._attn_implementation",
    "rows._fingerprint",
    "base._keys_to_ignore_on_load_missing",
    "base._keys_to_ignore_on_load_unexpected",
    "getattr(transformers, task.auto)._model_mapping",
)
"""Private names of Python's own, of transformers and of datasets."""
OVERRIDDEN = {"_FirstInput._apply"}
"""What torch asks of an heir: a ParallelStyle has no other method."""
NAMED_TUPLES = {"_asdict", "_fields", "_make", "_replace"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


Nodes = list[ast.AST]
"""All nodes of a file or a class: walked through once, and looked at several times."""


def nodes_of(code: str | ast.AST) -> Nodes:
    return list(ast.walk(ast.parse(code) if isinstance(code, str) else code))


def is_name(node: ast.AST, *names: str) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def names_of_torch(node: ast.AST) -> Iterator[str]:
    """The private names that an import takes from torch."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    elif isinstance(node, ast.Import):
        names = [alias.name for alias in node.names if alias.name.partition(".")[0] == "torch"]
    else:
        return
    yield from (name for name in names if any(map(is_private, name.split("."))))


def attributes(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Private attributes, and what they are of."""
    if isinstance(node, ast.Attribute) and is_private(node.attr):
        yield ast.unparse(node.value), node.attr
    if isinstance(node, ast.Call) and is_name(node.func, "getattr", "hasattr", "setattr", "delattr"):
        name = node.args[1]
        if isinstance(name, ast.Constant) and isinstance(name.value, str) and is_private(name.value):
            yield ast.unparse(node.args[0]), name.value


def defined(nodes: Nodes) -> set[str]:
    """Private names that a file gives to something of its own."""
    names = set()
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_name(node.value, "self"):
            names.add(node.attr)
    return {name for name in names if is_private(name)}


def heirs_of_torch(nodes: Nodes, heirs: Mapping[str, set[str]]) -> Iterator[tuple[ast.ClassDef, set[str]]]:
    """The classes that have bases of torch's, of torch_private and torch_groups, or of `heirs`, with their private names."""
    known: dict[str, Any] = {"torch": torch}
    for node in nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = getattr(node, "module", None)
            for alias in node.names:
                name = f"{module}.{alias.name}" if module else alias.name
                if name.partition(".")[0] == "torch" or module in (torch_private.__name__, torch_groups.__name__):
                    known[alias.asname or alias.name] = pkgutil.resolve_name(name)
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            names: set[str] = set()
            for base in node.bases:
                first, *rest = ast.unparse(base).partition("[")[0].split(".")
                if first in known:
                    kind = functools.reduce(getattr, rest, known[first])
                    names |= {name for name in dir(nn.Module() if kind is nn.Module else kind) if is_private(name)}
                names |= heirs.get(ast.unparse(base), set())
            if names:
                yield node, names


def all_heirs_of_torch(files: Collection[Nodes]) -> dict[str, set[str]]:
    """The classes of all files, by name, that have the private names of a base of torch's, however far away."""
    heirs: dict[str, set[str]] = {}
    while True:
        found = {kind.name: names for nodes in files for kind, names in heirs_of_torch(nodes, heirs)}
        if found == heirs:
            return heirs
        heirs = found


def private_names_of_torch(nodes: Nodes, own: set[str], heirs: Mapping[str, set[str]]) -> Iterator[str]:
    """torch's private names that a file uses.

    own: the names that classes of other files give to what they have. heirs: what `all_heirs_of_torch` found.
    """
    here = defined(nodes)
    for node in nodes:
        yield from names_of_torch(node)
        for value, name in attributes(node):
            # what a class has from a base in another file is known by `self` only
            ours = name in (own | here if value in ("self", "cls") else here) or name in NAMED_TUPLES
            if (not ours or value == "torch") and f"{value}.{name}" not in OTHERS and name != "_tp_plan":
                yield f"{node.lineno}: {value}.{name}"  # type: ignore[attr-defined]
    for kind, inherited in heirs_of_torch(nodes, heirs):
        inner = nodes_of(kind)
        used = {name for node in inner for value, name in attributes(node) if value in ("self", "cls")}
        taken = (f"{kind.name}.{name}" for name in (used | defined(inner)) & inherited)
        yield from (f"{kind.lineno}: {name}" for name in taken if name not in OVERRIDDEN)


@pytest.mark.thorough
def test_no_other_file_uses_a_private_name_of_torch() -> None:
    files = {file: nodes_of(file.read_text()) for file in sources() if file not in HOMES}
    assert len(files) > 200
    own = set.union(*map(defined, files.values()))
    heirs = all_heirs_of_torch(files.values())
    assert {"MPIProcessGroup", "MessageWork", "TimedStage", "GuardedStore"} <= set(heirs)
    found = [f"{file}:{name}" for file, nodes in files.items() for name in private_names_of_torch(nodes, own, heirs)]
    assert not found, "import it from hpctrain.base.torch_private, plugins from hpctrain.api:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "code",
    [
        "from torch._C import Graph", "from torch.serialization import _get_layout", "import torch._dynamo",
        "torch._foreach_mul_(a, b)", "module._buffers", "self._schema", "inner._parameters = {}",
        "getattr(group, '_get_backend')", "dist.distributed_c10d._unpickler = x",
        "from torch import nn\nclass Mine(nn.Module):\n    def f(self): self._modules = {}",
        "import torch.distributed as dist\nclass Mine(dist.ProcessGroup):\n    def _get_backend(self, device): ...",
        "class Mine(GroupBase):\n    def _get_backend(self, device): ...",
    ],
)  # fmt: skip
def test_what_counts_as_a_private_name(code: str) -> None:
    assert list(private_names_of_torch(nodes_of(code), {"_modules"}, {"GroupBase": {"_get_backend"}}))


def test_torch_has_every_private_name() -> None:
    nodes = [node for home in HOMES for node in nodes_of(home.read_text())]
    imported = {name for node in nodes for name in names_of_torch(node)}
    assert len(imported) >= 7
    for name in imported:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name
    used = {name for node in nodes for _, name in attributes(node)}
    used |= defined(nodes_of(HOMES[1].read_text()))  # what it overrides
    used |= {name.rpartition(".")[2] for name in imported}
    assert {name for name in used if is_private(name)} - {"_C"} == set(OWNERS)
    for name, owner in OWNERS.items():
        if name in OF_NCCL and not dist.is_nccl_available():
            continue
        if isinstance(owner, str):
            owner = importlib.import_module(owner)
        elif isinstance(owner, FunctionType):
            owner = owner()
        assert hasattr(owner, name), name


def test_plugins_get_them_from_the_api() -> None:
    shared = {name for name in hpctrain.api.__all__ if hasattr(torch_private, name)}
    assert {"buffers_of", "children_of", "is_view", "version_of", "storage_record", "TorchDispatchMode"} <= shared
    assert all(getattr(hpctrain.api, name) is getattr(torch_private, name) for name in shared)


def test_operators_that_selective_keeps_exist() -> None:
    """A user writes operators by the names that torch.ops.aten has, of which some begin with an underscore."""
    from hpctrain_plugins.activation_checkpointing.selective import SelectiveOptions

    assert all(hasattr(torch.ops.aten, name) for name in SelectiveOptions().keep)


def test_a_group_in_python_is_its_own_backend_on_the_cpu() -> None:
    group = torch_groups.PythonGroup(0, 1)
    assert group._get_backend(torch.device("cpu")) is group
    with pytest.raises(RuntimeError, match="No backend type associated with device type cuda"):
        group._get_backend(torch.device("cuda"))


LATE = """
import sys
import torch
from hpctrain.base.torch_private import delay_compiler

delay_compiler()
layer = torch.nn.Linear(3, 3)
optimizer = torch.optim.AdamW(layer.parameters())


def step():
    layer(torch.ones(3)).sum().backward()
    optimizer.step()


step()
with torch.device("meta"):
    torch.nn.Embedding(3, 3)
assert "torch._dynamo.convert_frame" not in sys.modules
compiled = torch.compile(lambda x: torch.sin(x) * 2, backend="eager", fullgraph=True)
assert torch.equal(compiled(torch.ones(3)), torch.sin(torch.ones(3)) * 2)
assert "torch._dynamo.convert_frame" in sys.modules and torch._dynamo is sys.modules["torch._dynamo"]
before = layer.weight.clone()
step()
assert not torch.equal(before, layer.weight)
torch.compiler.reset()
delay_compiler()
assert "convert_frame" in dir(torch._dynamo)
"""


DISABLED = """
import torch
from hpctrain.base.torch_private import delay_compiler

delay_compiler()


@torch.compiler.disable
def left_alone(x):
    return torch.sin(x) if x.sum().item() > 0 else x


@torch.compiler.disable(recursive=False)
def outer(x):
    return left_alone(x)


assert outer(torch.ones(3))[0] == torch.sin(torch.ones(()))
compiled = torch.compile(lambda x: left_alone(x * 2) + 1, backend="eager")
assert torch.equal(compiled(torch.ones(3)), torch.sin(torch.full((3,), 2.0)) + 1)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("program", [LATE, DISABLED], ids=["later", "disabled before"])
def test_the_compiler_is_imported_when_something_is_compiled(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
