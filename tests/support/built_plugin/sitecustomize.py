"""Runs what a Python process imports of this repository from the built wheel ``kvferry-vllm``, as far as the wheel holds it.

Takes effect in every process that has this folder in its PYTHONPATH, in the children of tests as well. ``KVFERRY_BUILT`` names
the folder in which the wheel is unpacked. A module of the wheel is found under its name in the repository, too, as one module
under two names, so that tests, suites and the wheel mean the same classes. Packages stay the repository's: they hold the
modules that the wheel lacks.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

OUTER = "kvferry_vllm"
INNER = f"{OUTER}._kvferry"


class _Loader(importlib.abc.Loader):
    """Gives a module of the wheel under its name in the repository."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._own_spec = module, module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """It has run under its own name, and keeps that."""
        module.__spec__ = self._own_spec


class BuiltModules(importlib.abc.MetaPathFinder):
    """Finds the modules of the wheel under the names of the repository."""

    def __init__(self, folder: Path) -> None:
        self._new_names = {}
        for path in (folder / OUTER).rglob("*.py"):
            if path.name != "__init__.py":
                new_name = ".".join(path.relative_to(folder).with_suffix("").parts)
                self._new_names[_name_in_the_repository(new_name)] = new_name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        new_name = self._new_names.get(fullname)
        if new_name is None:
            return None
        return importlib.machinery.ModuleSpec(fullname, _Loader(importlib.import_module(new_name)))


def _name_in_the_repository(name: str) -> str:
    if name.startswith(f"{INNER}."):
        return name.removeprefix(f"{INNER}.")
    return "connectors.vllm" + name.removeprefix(OUTER)


_folder = Path(os.environ["KVFERRY_BUILT"])
sys.path.insert(0, str(_folder))
sys.meta_path.insert(0, BuiltModules(_folder))
