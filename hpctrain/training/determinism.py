"""`[job] deterministic`: the same bits from the same job on the same hardware, or an error."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from hpctrain.base.devices import deterministic_cudnn
from hpctrain.base.errors import EnvironmentUnfitError
from hpctrain.job.environment import set_where_unset

# values of variables with which cuBLAS and NCCL sum in one order, the first being set where there is none. cuBLAS: its
# documentation, "Results reproducibility". NCCL: the tree's order, and that of sums in a switch, may change from run to run.
_ACCEPTED: Mapping[str, tuple[str, ...]] = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NCCL_ALGO": ("Ring", "CollnetDirect", "CollnetChain", "^NVLS", "^NVLS,NVLSTree"),
}


@contextmanager
def deterministic() -> Iterator[None]:
    """Let torch, cuBLAS and NCCL take deterministic algorithms in this context. Afterwards all is as before.

    torch raises RuntimeError for an operation that has none. EnvironmentUnfitError names a variable that prevents it.
    """
    for name, accepted in _ACCEPTED.items():
        found = os.environ.get(name, accepted[0])
        if found not in accepted:
            raise EnvironmentUnfitError(
                f"[job] deterministic: the variable {name} is {found!r}; expected one of {', '.join(accepted)}: unset it"
            )
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with set_where_unset({name: accepted[0] for name, accepted in _ACCEPTED.items()}), deterministic_cudnn():
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
