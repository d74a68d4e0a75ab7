"""Puts the .pth file beside the module; pyproject.toml has the rest."""

from __future__ import annotations

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithPath(build_py):
    """setuptools has no key for files of site-packages itself."""

    def run(self) -> None:
        super().run()
        self.copy_file("hpctrain_horovod_alias.pth", f"{self.build_lib}/hpctrain_horovod_alias.pth")

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), f"{self.build_lib}/hpctrain_horovod_alias.pth"]


setup(cmdclass={"build_py": BuildWithPath})
