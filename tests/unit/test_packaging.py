"""The distributions, built as an index would get them, and the installation in place."""

from __future__ import annotations

import re
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder
from mypy.modulefinder import FindModuleCache, SearchPaths, get_search_dirs

from hpctrain import __version__

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel, and the unpacked sdist."""
    directory = tmp_path_factory.mktemp("dist")
    wheel, sdist = (_built(builder(str(ROOT)), directory) for builder in (WheelBuilder, SdistBuilder))
    with tarfile.open(sdist) as tar:
        tar.extractall(directory, filter="data")
    return wheel, directory / sdist.name.removesuffix(".tar.gz")


def _built(builder: WheelBuilder | SdistBuilder, directory: Path) -> Path:
    return Path(next(iter(builder.build(directory=str(directory), versions=["standard"]))))


def _look(wheel: Path, *folders: Path) -> tuple[set[str], str]:
    """The names in a wheel and its metadata; all files of the packages are in it, and its page is one that an index can show."""
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        metadata = file.read(next(name for name in names if name.endswith("/METADATA"))).decode()
    for folder in folders:
        files = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        assert {f"{folder.name}/{path.relative_to(folder)}" for path in files} <= names
    head, _, page = metadata.partition("\n\n")
    assert "git+" not in head and " @ " not in head, "an index refuses requirements with an address"
    links = re.findall(r"\]\(([^)]*)\)", page)
    assert len(links) > 10 and [link for link in links if not link.startswith(("https://", "#"))] == []
    return {name.partition("/")[0] for name in names if ".dist-info" not in name}, head


def test_the_wheel_has_its_packages_and_a_page_that_an_index_can_show(built: tuple[Path, Path]) -> None:
    folders = [ROOT / "hpctrain", ROOT / "plugins" / "hpctrain_plugins", ROOT / "plugins" / "hpctrain_tools"]
    top, _ = _look(built[0], *folders)
    assert top == {folder.name for folder in folders}


def test_the_wheel_of_horovods_interface(tmp_path: Path) -> None:
    """It has the file that Python reads at its start, and needs the hpctrain that it was built beside."""
    home = ROOT / "plugins" / "hpctrain-horovod"
    top, head = _look(_built(WheelBuilder(str(home)), tmp_path), home / "hpctrain_horovod")
    assert top == {"hpctrain_horovod", "hpctrain_horovod_alias.pth", "hpctrain_horovod_alias.py"}
    assert f"\nVersion: {__version__}\n" in head and f"\nRequires-Dist: hpctrain=={__version__}\n" in head


@pytest.mark.parametrize("name", ["hpctrain-huggingface", "hpctrain-dilated-attention", "hpctrain-ray"])
def test_the_wheel_of_another_distribution(name: str, tmp_path: Path) -> None:
    home, package = ROOT / "plugins" / name, name.replace("-", "_")
    top, head = _look(_built(WheelBuilder(str(home)), tmp_path), home / package)
    assert top == {package}
    assert f"\nVersion: {__version__}\n" in head and f"\nRequires-Dist: hpctrain=={__version__}\n" in head


def test_the_sdist_has_what_readme_names(built: tuple[Path, Path]) -> None:
    text = (ROOT / "README.md").read_text()
    linked = [
        link.partition("#")[0] for link in re.findall(r"\]\(([^)]*)\)", text) if not link.startswith(("https:", "#"))
    ]
    typed = set(re.findall(r"\b(?:examples|tests|slurm|docs|constraints)[\w./-]*\w", text)) - {"slurm-wlm"}  # Debian's
    assert len(linked) > 10 and "examples/quickstart.toml" in typed and "constraints.txt" in typed
    missing = {name for name in (*linked, *typed) if not (built[1] / name).exists()}
    assert missing == set() and (built[1] / "pyproject.toml").exists()


def test_type_checkers_find_a_package_that_is_installed_in_place() -> None:
    on_path, in_site = get_search_dirs(sys.executable)
    finder = FindModuleCache(SearchPaths((), (), (*on_path, *in_site), ()), None, None)
    for name, folder in (
        ("hpctrain.api", ROOT),
        ("hpctrain_plugins.model.gpt", ROOT / "plugins"),
        ("hpctrain_tools.plan.plan", ROOT / "plugins"),
        ("hpctrain_horovod.torch", ROOT / "plugins" / "hpctrain-horovod"),
        ("hpctrain_huggingface.model", ROOT / "plugins" / "hpctrain-huggingface"),
        ("hpctrain_dilated_attention.model", ROOT / "plugins" / "hpctrain-dilated-attention"),
        ("hpctrain_ray.scheduler", ROOT / "plugins" / "hpctrain-ray"),
    ):
        found = finder.find_module(name)
        assert isinstance(found, str) and Path(found).is_relative_to(folder), found
