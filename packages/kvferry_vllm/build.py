"""Builds the wheel ``kvferry-vllm``: the plug-in for vLLM and the part of this repository that it imports, under one name.

In a vLLM image nothing generic may appear, neither a package ``core`` nor another version of a library. So the modules of
``connectors.vllm`` become ``kvferry_vllm``, and the modules that they import, and so on, become ``kvferry_vllm._kvferry``, with
their imports rewritten. Usage: ``python packages/kvferry_vllm/build.py FOLDER`` writes the wheel into the folder.
"""

from __future__ import annotations

import argparse
import ast
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "kvferry_vllm"
PLUGIN = "connectors.vllm"
INNER = f"{PACKAGE}._kvferry"
OURS = ("core", "router", "encode", "prefill", "decode", "agent", "connectors", "kvstore", "kvferry")
C_SOURCES = ("core/_multilinear.c", "core/_hash_chain.c", "core/_stream_copy.c")
VERSION_MODULE = "core.release"


class BuildError(Exception):
    """A module cannot be carried over."""


def path_of(module: str, root: Path = ROOT) -> Path | None:
    """Return the file of one of our modules or packages; None if there is none of this name."""
    base = root.joinpath(*module.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


def imports_of(module: str) -> set[str]:
    """Return the modules of ours that a module imports when it runs.

    Raises:
        BuildError: it names one in a way that cannot be rewritten.
    """
    path = path_of(module)
    assert path is not None, module
    tree = ast.parse(path.read_text())
    for_types = {id(inner) for node in ast.walk(tree) if _is_for_types(node) for inner in ast.walk(node)}
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _is_ours(alias.name):
                    raise BuildError(f"{module}:{node.lineno}: write 'from ... import ...' instead of 'import {alias.name}'")
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level and _is_ours(node.module):
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names if path_of(f"{node.module}.{alias.name}"))
    return found


def closure(start: Iterable[str]) -> list[str]:
    """Return these modules, all that they import, and the packages that hold them, sorted."""
    found: set[str] = set()
    waiting = list(start)
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting += imports_of(module)
            waiting += [module.rpartition(".")[0]] if "." in module else []
    return sorted(found)


def plugin_modules() -> list[str]:
    """Return the modules of the plug-in."""
    folder = ROOT.joinpath(*PLUGIN.split("."))
    return [PLUGIN, *(f"{PLUGIN}.{path.stem}" for path in sorted(folder.glob("*.py")) if path.stem != "__init__")]


def new_name(module: str) -> str:
    """Return the name of one of our modules in the wheel."""
    if module == PLUGIN or module.startswith(f"{PLUGIN}."):
        return PACKAGE + module.removeprefix(PLUGIN)
    return f"{INNER}.{module}"


def rewritten(source: str) -> str:
    """Return a module's source with its imports of our modules under their new names."""
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module is not None and not node.level and _is_ours(node.module):
            line, start = lines[node.lineno - 1], node.col_offset
            old = f"from {node.module} import"
            assert line[start:].startswith(old), line
            lines[node.lineno - 1] = f"{line[:start]}from {new_name(node.module)} import{line[start + len(old) :]}"
    return "".join(lines)


def write_tree(folder: Path) -> None:
    """Write the sources of the wheel."""
    for module in closure([*plugin_modules(), VERSION_MODULE]):
        path = path_of(module)
        assert path is not None, module
        name = new_name(module)
        target = folder.joinpath(*name.split("."))
        target = target / "__init__.py" if path.name == "__init__.py" else target.with_suffix(".py")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(rewritten(path.read_text()))
    inner = folder.joinpath(*INNER.split("."))
    (inner / "__init__.py").write_text('"""The transport agent of kvferry, as this plug-in was built with it."""\n')
    for source in C_SOURCES:
        shutil.copy(ROOT / source, inner / source)
    (folder / PACKAGE / "py.typed").touch()
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(Path(__file__).parent / name, folder)
    shutil.copy(ROOT / "LICENSE", folder)


def build(target: Path) -> Path:
    """Build the wheel into a folder, without a network; return its path."""
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name) / "tree"
        write_tree(tree)
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
        subprocess.run([*command, str(target), str(tree)], check=True)
    return max(target.glob(f"{PACKAGE}-*.whl"), key=lambda path: path.stat().st_mtime)


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in OURS


def main() -> None:
    """Build the wheel into the folder that the command names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    sys.stdout.write(f"{build(parser.parse_args().folder)}\n")


if __name__ == "__main__":
    main()
