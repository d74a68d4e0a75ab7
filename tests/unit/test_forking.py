"""Ranks that are forked from their starter: its streams."""

from __future__ import annotations

import sys

import pytest
from jobs import JobFile
from launching import run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux only")


@pytest.mark.cases(thorough=[">&-"], rest="nightly")
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_ranks_are_forked_where_a_standard_stream_is_closed(job: JobFile, closed: str) -> None:
    words = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-m", "hpctrain", "run", "job.toml", "-n", "2"]
    done = run(words, job.directory)
    assert done.code == 0 and not done.err and len(job.losses()) == 4, done
