"""The Slurm that all tests of this folder share, and the losses of their job in one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from jobs import JobFile
from launching import hpctrain, run

from slurm.cluster import Cluster, temporary_cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    with temporary_cluster() as made:
        yield made


@pytest.fixture(scope="session")
def losses_alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the job as `job` makes it, trained by one process."""
    job = JobFile(tmp_path_factory.mktemp("alone"))
    done = run(hpctrain("run", "job.toml"), job.directory)
    assert done.code == 0, done
    return job.losses()
