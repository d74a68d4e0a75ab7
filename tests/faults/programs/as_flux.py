"""Starts two ranks of `hpctrain WORDS...` as Flux starts tasks: with a descriptor for PMI-1, and no port."""

from __future__ import annotations

import os
import subprocess
import sys

from hpctrain_tools.launch.pmi import PmiServer

RANKS = 2

server = PmiServer(RANKS)
ranks = [
    subprocess.Popen(
        [sys.executable, "-m", "hpctrain", *sys.argv[1:]],
        env={**os.environ, **server.environment(rank), "FLUX_TASK_RANK": str(rank), "FLUX_JOB_SIZE": str(RANKS)},
        pass_fds=server.descriptors(rank),
    )
    for rank in range(RANKS)
]
server.started()
sys.exit(max(rank.wait() for rank in ranks))
