"""[environment]: which variables a job may set, and whose value counts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hpctrain_tools.doctor.variables import settings
from jobs import TINY, JobFile

import hpctrain
from hpctrain.base.errors import HpctrainError
from hpctrain.checking.check import check
from hpctrain.job.environment import name_problem, variables
from hpctrain.job.raw import RawJob
from hpctrain.job.reading import read_job

REFUSED = [
    "LD_PRELOAD", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "PYTHONSTARTUP", "HPCTRAIN_STARTED_IN", "PMI_RANK", "PMIX_RANK",
    "SLURM_PROCID", "RANK", "WORLD_SIZE", "MASTER_ADDR", "OMPI_COMM_WORLD_SIZE", "HOME", "BASH_ENV", "TORCHELASTIC_RUN_ID", "",
    "OMP_NUM THREADS", "FI_=", "OMPI_MCA_mca_base_component_path", "OMPI_MCA_plm_rsh_agent", "PRTE_MCA_prte_launch_agent",
    "OMPI_MCA_mca_base_param_files", "OMPI_MCA_mca_base_env_list", "NCCL_NET_PLUGIN", "NCCL_TUNER_PLUGIN", "NCCL_CONF_FILE",
    "FI_PROVIDER_PATH", "UCX_MODULE_DIR", "UCX_CONFIG_DIR", "UCX_GDB_COMMAND", "CUDA_INJECTION64_PATH", "CUDA_HOME",
    "OMP_TOOL_LIBRARIES", "HSA_TOOLS_LIB", "TORCH_EXTENSIONS_DIR", "TORCH_HOME", "PYTORCH_KERNEL_CACHE_PATH", "NCCL_API_TOKEN",
    "UCX_SECRET", "UCX_APIKEY", "NCCL_HPCTOKEN", "FI_AUTH_KEYS", "FI_DBPASSWORD",
]  # fmt: skip
TAKEN = [
    "OMPI_MCA_btl", "PRTE_MCA_hwloc_default_binding_policy", "MPIR_CVAR_CH4_NETMOD", "MPICH_GPU_SUPPORT_ENABLED", "FI_PROVIDER",
    "UCX_TLS", "UCX_IB_NUM_PATHS", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_TOPO_FILE", "RCCL_MSCCL_ENABLE", "GLOO_SOCKET_IFNAME",
    "OMP_NUM_THREADS", "OMP_PROC_BIND", "KMP_AFFINITY", "MKL_NUM_THREADS", "CUDA_MODULE_LOADING", "CUDA_LAUNCH_BLOCKING",
    "CUBLAS_WORKSPACE_CONFIG", "HIP_VISIBLE_DEVICES", "TORCH_LOGS", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "PYTORCH_CUDA_ALLOC_CONF",
    "TOKENIZERS_PARALLELISM", "UCX_IB_PKEY", "UCX_RKEY_PTR_SEG_SIZE",
]  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_no_job_sets_what_runs_code_breaks_the_start_or_is_secret(name: str) -> None:
    assert name_problem(name)
    assert variables({"environment": {name: "x", "FI_PROVIDER": "tcp"}}) == {"FI_PROVIDER": "tcp"}


@pytest.mark.parametrize("name", TAKEN)
def test_a_job_sets_variables_of_libraries(name: str) -> None:
    assert name_problem(name) is None


def test_each_wrong_variable_is_named_with_its_line(job: JobFile) -> None:
    job.set(environment={"LD_PRELOAD": "/x.so", "FI_PROVIDER": True, "UCX_TLS": "a\nb", "OMP_NUM_THREADS": 3})
    with pytest.raises(HpctrainError) as caught:
        check(read_job(job.path), None)
    problems = str(caught.value).splitlines()
    assert len(problems) == 3 and all(f"{job.path}:" in problem for problem in problems), problems
    assert "[environment] LD_PRELOAD: expected the name of a variable that begins with OMPI_MCA_," in problems[0]
    assert variables(read_job(job.path).tables) == {"OMP_NUM_THREADS": "3"}


def test_integers_are_texts() -> None:
    raw = RawJob({**TINY, "environment": {"OMP_NUM_THREADS": 4}}, {}, "job")
    assert check(raw, None).job.environment == variables(raw.tables) == {"OMP_NUM_THREADS": "4"}


@pytest.mark.parametrize("tables", [{}, {"environment": 3}, {"environment": ["a"]}, {"environment": {"FI_A": ["x"]}}])
def test_tables_of_any_shape_set_nothing(tables: dict[str, Any]) -> None:
    assert variables(tables) == {}


def test_doctor_shows_no_secret() -> None:
    found = settings({"UCX_TLS": "rc", "NCCL_API_TOKEN": "s3cret", "UCX_APIKEY": "s3cret", "CUDA_VISIBLE_DEVICES": "1"})
    assert found == {"UCX_TLS": "rc"}


def test_run_sets_them_for_the_job_and_says_what_comes_too_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UCX_TLS", "rc")
    monkeypatch.delenv("NCCL_DEBUG", raising=False)
    monkeypatch.delenv("OMP_DYNAMIC", raising=False)
    table = {"UCX_TLS": "tcp", "NCCL_DEBUG": "WARN", "OMP_DYNAMIC": "false"}
    seen: dict[str, str | None] = {}

    def model() -> Any:
        import torch

        seen.update({name: os.environ.get(name) for name in table})
        return torch.nn.Linear(3, 2)

    data = [([0.0] * 3, 1)] * 4
    tables = {
        **TINY, "model": {"name": model, "loss": "torch.nn.functional:cross_entropy"}, "dataset": {"name": _tensors(data)},
        "batch": {"global_size": 2, "micro_size": 2}, "environment": table,
    }  # fmt: skip
    assert hpctrain.run(tables)["exit_code"] == 0
    assert seen == {"UCX_TLS": "rc", "NCCL_DEBUG": "WARN", "OMP_DYNAMIC": "false"}
    assert "NCCL_DEBUG" not in os.environ and os.environ["UCX_TLS"] == "rc"
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("environment  "))
    assert line == (
        "environment  UCX_TLS=rc of the shell instead of tcp; NCCL_DEBUG=WARN; "
        "OMP_DYNAMIC=false, set too late: its reader had started"
    )


def _tensors(rows: list[tuple[list[float], int]]) -> list[tuple[Any, int]]:
    import torch

    return [(torch.tensor(row), target) for row, target in rows]


def test_they_are_read_without_torch() -> None:
    words = [
        sys.executable,
        "-c",
        "import sys, hpctrain.job.environment, hpctrain.job.reading; assert 'torch' not in sys.modules",
    ]
    assert subprocess.run(words, timeout=60).returncode == 0
