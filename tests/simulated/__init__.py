"""Registers a simulated accelerator with torch as the device "sim": `import simulated` builds it with the system's g++."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from packages import need_commands
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_init
from torch.utils.cpp_extension import include_paths, library_paths

NAME, DEVICES = "sim", 2
_HERE = Path(__file__).parent
_SOURCES = sorted(_HERE.glob("*.cpp"))
_FLAGS = ["-std=c++20", "-O1", "-fPIC", "-Wall", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]


def built() -> Path:
    """The library, built anew for other sources or another torch."""
    content = b"".join(path.read_bytes() for path in [_HERE / "simulated.h", *_SOURCES])
    key = hashlib.sha256(content + f"{torch.__version__} {sys.version} {_FLAGS}".encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "hpctrain-simulated")
    library = folder / f"{key}.so"
    if library.exists():
        return library
    need_commands("g++")
    folder.mkdir(parents=True, exist_ok=True)
    includes = [f"-isystem{path}" for path in [*include_paths(), sysconfig.get_path("include")]]
    with tempfile.TemporaryDirectory(dir=folder) as there:

        def compiled(source: Path) -> str:
            target = str(Path(there, source.stem + ".o"))
            subprocess.run(["g++", *_FLAGS, *includes, "-c", str(source), "-o", target], check=True, timeout=600)
            return target

        with ThreadPoolExecutor(2) as pool:
            objects = list(pool.map(compiled, _SOURCES))
        libraries = [f"-L{path}" for path in library_paths()]
        whole = Path(there, "whole.so")
        words = ["g++", "-shared", *objects, "-o", str(whole), *libraries, "-ltorch", "-ltorch_cpu", "-lc10"]
        subprocess.run(words, check=True, timeout=600)
        whole.replace(library)
    return library


def register() -> torch.device:
    """Make the device known to torch in this process."""
    torch.utils.rename_privateuse1_backend(NAME)
    torch.ops.load_library(built())
    torch._register_device_module(NAME, _module())
    torch.utils.generate_methods_for_privateuse1_backend()
    _fsdp_init._move_states_to_device = _move_in_place
    return torch.device(NAME)


def _move_in_place(parameters: list[Tensor], buffers: list[Tensor], device: torch.device) -> None:
    """What fully_shard does with a module that has values: a new memory of `tensor.data` may be of torch's own devices only."""
    for one in (*parameters, *buffers):
        if one.device != device and not one.is_meta:
            torch._C._swap_tensor_impl(one, one.detach().to(device).requires_grad_(one.requires_grad))


def _module() -> ModuleType:
    """The module of the device, with as much of torch.cuda's as torch and hpctrain ask for."""
    module: Any = ModuleType(f"torch.{NAME}")
    accelerator = torch.accelerator

    def number(device: Any) -> int:
        index = device if isinstance(device, int) else torch.device(device).index
        return accelerator.current_device_index() if index in (None, -1) else int(index)

    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module._lazy_init = lambda: None
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: DEVICES
    module.current_device = accelerator.current_device_index
    module.set_device = lambda device: accelerator.set_device_index(
        torch.device(device) if isinstance(device, str) else device
    )
    module.synchronize = accelerator.synchronize
    module.current_stream = lambda device=None: accelerator.current_stream(device)
    module.set_stream = accelerator.set_stream
    module.stream = lambda given: given  # a torch.Stream is its own context
    module.Stream = lambda device=None, priority=0: torch.Stream(device=device or NAME, priority=priority)
    module.Event = lambda **named: torch.Event(device=NAME, **named)
    module.get_device_name = lambda device=None: "simulated accelerator"
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.is_bf16_supported = lambda: True
    module.get_rng_state = lambda device=-1: torch.ops.simulated.state(number(device))
    module.set_rng_state = lambda state, device=-1: torch.ops.simulated.restore(number(device), state)
    module.manual_seed = lambda seed: torch.ops.simulated.seed(-1, _signed(seed))
    module.manual_seed_all = lambda seed: [torch.ops.simulated.seed(one, _signed(seed)) for one in range(DEVICES)]
    return module


def _signed(seed: int) -> int:
    """The same 64 bits as an operator takes them."""
    return seed - 2**64 if seed >= 2**63 else seed
