"""Runs tests of the transport agent against the built wheel ``kvferry-vllm``: ``pytest -p tests.support.built_plugin``.

``KVFERRY_BUILT`` names the folder in which the wheel is unpacked. A module that the wheel holds is taken from there, under its
name in this repository as well, so that tests and test suites mean the same classes.
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

INNER = "kvferry_vllm._kvferry"


class _Loader(importlib.abc.Loader):
    """Gives a module of the wheel under its name in the repository."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """It has run, under its own name."""


class BuiltModules(importlib.abc.MetaPathFinder):
    """Finds the modules of the repository that the wheel holds."""

    def __init__(self, folder: Path) -> None:
        root = folder.joinpath(*INNER.split("."))
        files = [path.relative_to(root).with_suffix("") for path in root.rglob("*.py") if path.name != "__init__.py"]
        self.names = {".".join(path.parts) for path in files}
        self.used: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.names:
            return None
        module = importlib.import_module(f"{INNER}.{fullname}")
        self.used.add(fullname)
        own_spec = module.__spec__
        return importlib.machinery.ModuleSpec(fullname, _Loader(module), origin=own_spec.origin if own_spec else None)


_folder = Path(os.environ["KVFERRY_BUILT"])
_loaded_before = sorted(name for name in sys.modules if name.partition(".")[0] in {"core", "connectors"})
assert not _loaded_before, f"the repository's own modules are loaded already: {_loaded_before}"
sys.path.insert(0, str(_folder))
finder = BuiltModules(_folder)
sys.meta_path.insert(0, finder)


def pytest_terminal_summary(terminalreporter) -> None:
    """Say how many modules came from the wheel."""
    terminalreporter.write_line(f"{len(finder.used)} modules of the wheel")
