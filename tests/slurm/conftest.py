"""The Slurm that all tests of this folder share, and the losses of their job in one process."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import JobFile
from launching import hpctrain, run

from slurm.cluster import Cluster, why_not


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A Slurm of two nodes. If that is impossible, the tests are skipped; on CI, which must not skip them, they fail."""
    reason = why_not()
    if reason is not None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(f"no Slurm to test with: {reason}")
    directory = Path(tempfile.mkdtemp(prefix="slurm-"))
    directory.chmod(0o755)
    cluster = Cluster(directory)
    yield cluster
    cluster.stop()
    shutil.rmtree(directory)


@pytest.fixture(scope="session")
def losses_alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the job as `job` makes it, trained by one process."""
    job = JobFile(tmp_path_factory.mktemp("alone"))
    done = run(hpctrain("run", "job.toml"), job.directory)
    assert done.code == 0, done
    return job.losses()
