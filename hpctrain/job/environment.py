"""[environment]: variables of the libraries below hpctrain, set in this process before these libraries start.

Each rank reads them from the job file itself: MPI reads its variables before rank 0 can send anything. Imports nothing slow.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hpctrain.base.errors import EnvironmentUnfitError, escaped
from hpctrain.base.safe_files import cache_directory, own_directory, stays, temporary_place

PREFIXES = (
    "OMPI_MCA_", "PRTE_MCA_", "MPIR_CVAR_", "MPICH_", "FI_", "UCX_", "UCC_", "NCCL_", "RCCL_", "GLOO_", "TORCH_", "PYTORCH_",
    "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "ONEDNN_", "CUDA_", "CUBLAS_", "CUDNN_", "HIP_", "HSA_", "MIOPEN_", "TOKENIZERS_",
)  # fmt: skip
READ_BY_MPIEXEC = ("OMPI_MCA_", "PRTE_MCA_")
"""Prefixes of variables that an mpiexec reads before there is a rank."""
# parts of names whose values are programs, libraries, directories of these, or more variables
_CODE = re.compile(
    r"PATH$|PLUGIN|LIBRAR|(^|_)LIB(_|$)|AGENT|PREFIX|EXEC|COMMAND|_DIR$|_HOME$|(CONFIG|CONF|PARAM)_FILE|ENV_LIST",
    re.IGNORECASE,
)
SECRET = re.compile(r"SECRET|TOKEN(?!IZER)|PASSW|CREDENTIAL|(?<!_[A-Z])KEYS?(_|$)", re.IGNORECASE)
"""Parts of names whose values are secrets; a PKEY and an RKEY are InfiniBand's."""
# the Python module whose import makes libraries read variables
_READERS = {
    "torch": ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "ONEDNN_", "TORCH_", "PYTORCH_"),
    "mpi4py.MPI": ("OMPI_MCA_", "PRTE_MCA_", "MPIR_CVAR_", "MPICH_", "FI_", "UCX_", "UCC_"),
}

# the variables by which compilers find their caches, and the folders that hpctrain gives them
_CACHES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "CUDA_CACHE_PATH": "nvidia",
    "MIOPEN_USER_DB_PATH": "miopen",
    "MIOPEN_CUSTOM_CACHE_DIR": "miopen-kernels",
}

# variables that `export` has set after their readers had started; global, as `os.environ` is
_late: set[str] = set()


def name_problem(name: str) -> str | None:
    """The reason why a job may not set the variable."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name) or not name.startswith(PREFIXES):
        begins = ", ".join(PREFIXES)
        return f"expected the name of a variable that begins with {begins}; set others in the shell or the batch script"
    if SECRET.search(name):
        return "expected no secret, since the job is recorded in its run; set it in the shell"
    if _CODE.search(name):
        return "expected no variable that may name code to load or to run, or further variables; set it in the shell"
    return None


def text_problem(text: str) -> str | None:
    """The reason why a variable may not have this value."""
    return None if text.isprintable() else "expected one line of printable text"


def variables(tables: Mapping[str, Any]) -> dict[str, str]:
    """The variables in a job's tables. Those that no job may set are left out; the check of the job reports them."""
    table = tables.get("environment")
    items = table.items() if isinstance(table, Mapping) else ()  # not checked yet
    texts = {name: as_text(value) for name, value in items if name_problem(name) is None}
    return {name: text for name, text in texts.items() if isinstance(text, str) and text_problem(text) is None}


def as_text(value: object) -> object:
    """An integer as text: `--set environment.OMP_NUM_THREADS=4` is one."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def export(tables: Mapping[str, Any]) -> list[str]:
    """Set a job's variables for this process and those that it starts. Those that the shell has set stay as they are; returns the
    names of the others."""
    lacking = {name: text for name, text in variables(tables).items() if name not in os.environ}
    os.environ.update(lacking)
    started = tuple(prefix for module, prefixes in _READERS.items() if module in sys.modules for prefix in prefixes)
    _late.update(name for name in lacking if name.startswith(started))
    return list(lacking)


@contextmanager
def exported(tables: Mapping[str, Any]) -> Iterator[None]:
    """Call `export`; take its variables back at the end of the context."""
    names = export(tables)
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)  # the user's code may have removed it
            _late.discard(name)


@contextmanager
def set_where_unset(defaults: Mapping[str, str]) -> Iterator[None]:
    """Set the variables that the environment lacks, in this context."""
    lacking = [name for name in defaults if name not in os.environ]
    os.environ.update({name: defaults[name] for name in lacking})
    try:
        yield
    finally:
        for name in lacking:
            os.environ.pop(name, None)


@contextmanager
def cached_on_node() -> Iterator[None]:
    """Give compilers caches that only this user can write to, in this context: on this node's own disk, `$TMPDIR` or /tmp, else in
    the user's cache. The shell's settings stay. Raises EnvironmentUnfitError where others can write: cached kernels are code."""
    for name in _CACHES:
        cache = Path(os.environ.get(name) or os.devnull)
        # root can write everywhere anyway
        if cache.is_dir() and (cache.stat().st_mode & 0o002 or cache.stat().st_uid not in (0, os.geteuid())):
            raise EnvironmentUnfitError(
                f"{name}={cache}: other users can write there what would run as you; name a directory of your own"
            )
    # nothing can be made below /dev/null: a job that compiles ends with `refuse_shared_caches`, any other one runs
    home = next((place for place in _places() if _is_safe(place)), Path(os.devnull))
    # torch keeps precompiled headers in /tmp/torchinductor_USER, whatever is set
    headers = {"TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}
    with set_where_unset(headers | {name: str(home / folder) for name, folder in _CACHES.items()}):
        yield


def _is_safe(directory: Path) -> bool:
    """Whether `directory`, made where it is missing, is this user's, and nobody can put another one in its place."""
    with suppress(OSError):  # a directory of somebody else raises it
        return stays(own_directory(directory))
    return False


def _places() -> list[Path]:
    name = f"hpctrain-{os.geteuid()}-kernels"
    return [temporary_place() / name, cache_directory() / "compilers", Path("/tmp", name)]


def refuse_shared_caches() -> None:
    """Raise EnvironmentUnfitError where `cached_on_node` has found no safe directory."""
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR", "").startswith(os.devnull):
        places = " and ".join(str(place.parent) for place in _places())
        raise EnvironmentUnfitError(
            f"[compile]: kernels are code, and other users can write in each of {places}, or in a directory above it; set TMPDIR "
            "to a directory that only you can write to, as well as what is above it (`chmod go-w`)"
        )


def described(tables: Mapping[str, Any]) -> str:
    """The job's variables as this process has them, for the screen and the log; "" if there are none."""
    words = []
    for name, text in variables(tables).items():
        value = os.environ.get(name)
        if value != text:
            words.append(f"{name}={value} of the shell instead of {text}")
        else:
            words.append(f"{name}={text}" + (", set too late: its reader had started" if name in _late else ""))
    return escaped("; ".join(words))
