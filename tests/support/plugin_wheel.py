"""The wheel ``kvferry-vllm`` for tests: build it, unpack it, and run what imports this repository on it."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

BUILD_TIMEOUT_S = 120.0

_ROOT = Path(__file__).parents[2]
BUILDER = _ROOT / "packages/kvferry_vllm/build.py"


def build_wheel(folder: Path, **variables: str) -> Path:
    """Build the wheel into a new folder; ``variables`` are added to the environment of the build."""
    command = [sys.executable, str(BUILDER), str(folder)]
    subprocess.run(command, check=True, capture_output=True, timeout=BUILD_TIMEOUT_S, env=os.environ | variables)
    (found,) = folder.glob("*.whl")
    return found


def unpack_wheel(wheel: Path, folder: Path) -> Path:
    """Unpack the wheel into a folder, for PYTHONPATH; return the folder."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def environment_on(unpacked: Path) -> dict[str, str]:
    """Return variables with which a process, and its children, take modules of this repository from the unpacked wheel."""
    return {"KVFERRY_BUILT": str(unpacked), "PYTHONPATH": str(Path(__file__).parent / "built_plugin")}
