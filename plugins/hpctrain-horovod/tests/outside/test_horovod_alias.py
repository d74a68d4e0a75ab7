"""hpctrain-horovod, installed into an environment of its own: every program has `import horovod`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from launching import run

SOURCE = Path(__file__).parents[2]
ROOT = SOURCE.parents[1]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter with the distribution; everything else comes from this one."""
    home = tmp_path_factory.mktemp("alias") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True, timeout=120)
    python = str(home / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", str(SOURCE)]
    subprocess.run(pip, check=True, timeout=300)
    [site] = (home / "lib").glob("python*/site-packages")
    others = [entry for entry in sys.path if entry.endswith("site-packages")]
    (site / "zz-others.pth").write_text("\n".join([*others, str(ROOT), str(ROOT / "plugins")]) + "\n")
    return python


@pytest.mark.thorough
def test_every_program_has_horovod(python: str, tmp_path: Path) -> None:
    text = (
        "import sys; assert not any(name.startswith(('hpctrain.', 'torch')) for name in sys.modules), 'start-up'\n"
        "import horovod.torch as hvd, horovod.common.exceptions, hpctrain_horovod.torch\n"
        "assert hvd is hpctrain_horovod.torch\nhvd.init()\n"
        "import torch\nfound = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum).item()\n"
        "print(f'{found}\\n', end='')\n"
    )
    (tmp_path / "script.py").write_text(text)
    words = [str(Path(sys.executable).parent / "mpiexec"), "-n", "2", python, "script.py"]
    done = run(words, tmp_path, env={"LD_LIBRARY_PATH": f"{sys.prefix}/lib"})  # where the wheel of MPI has its library
    assert done.code == 0 and done.out.split() == ["3.0", "3.0"], done


@pytest.mark.thorough
def test_a_real_horovod_keeps_its_name(python: str, tmp_path: Path) -> None:
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("kind = 'real'\n")
    (tmp_path / "script.py").write_text("import horovod; print(horovod.kind)\n")
    done = run([python, "script.py"], tmp_path)
    assert done.code == 0 and done.out == "real\n", done
