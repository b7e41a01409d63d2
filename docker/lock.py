"""Writes the hashed list of an image's Python packages, from which its build installs and nothing else.

    python3.11 docker/lock.py cpu|cuda|agent [--index-url URL] [PIP OPTION ...] > docker/requirements-VARIANT.lock

Owns which packages an image has: torch, what pyproject.toml names with the extras of the variant, and what these need, at the
versions of constraints.txt. ``agent`` is for routers and agents over vLLM engines: it has no torch, nor what reads weights. pip
resolves and downloads; nothing is installed. Run it with the Python and on the platform of the image (3.11, Linux x86_64): a
hash is that of one wheel. For ``cpu`` pip must find torch's build for CPUs, whose version ends in ``+cpu``
(``--extra-index-url https://download.pytorch.org/whl/cpu``).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
EXTRAS = {  # with the NIXL for torch's CUDA
    "cpu": ("nixl", "redis", "otel", "vision"),
    "cuda": ("nixl-cu13", "redis", "otel", "vision"),
    "agent": ("otel", "vision"),
}
OF_ENGINES = {"torch", "safetensors", "gguf"}  # needed only by a process that computes


def wanted(variant: str) -> list[str]:
    """Return what the packages of a variant are resolved from; setuptools builds kvferry's own."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    pins = (ROOT / "constraints.txt").read_text()
    left_out = OF_ENGINES if variant == "agent" else set()
    names = [name for name in ("torch", "setuptools") if name not in left_out]
    exact = [found[0] for name in names if (found := re.search(rf"^{name}==\S+$", pins, re.MULTILINE))]
    found = [*project["dependencies"], *(one for extra in EXTRAS[variant] for one in extras[extra])]
    return [*exact, *(requirement for requirement in found if _name(requirement) not in {"torch", *left_out})]


def _name(requirement: str) -> str:
    return re.match(r"[\w.-]+", requirement)[0]


def resolve(variant: str, options: list[str]) -> dict[str, Any]:
    """Return pip's report of what it would install."""
    with tempfile.TemporaryDirectory() as folder:
        listed, report = Path(folder, "requirements.txt"), Path(folder, "report.json")
        listed.write_text("\n".join(wanted(variant)) + "\n")
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--dry-run",
            "--ignore-installed",
            "--quiet",
            "--report",
            str(report),
        ]
        command += ["--only-binary", ":all:", "--constraint", str(ROOT / "constraints.txt"), "--requirement", str(listed)]
        subprocess.run([*command, *options], check=True, stdout=sys.stderr)
        return json.loads(report.read_text())


def render(report: dict[str, Any]) -> str:
    """Return the lines of the lock file, one package each, by name."""
    lines = []
    for item in report["install"]:
        name = re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower()
        digest = item["download_info"]["archive_info"]["hashes"]["sha256"]
        lines.append(f"{name}=={item['metadata']['version']} --hash=sha256:{digest}")
    return "\n".join(sorted(lines)) + "\n"


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in EXTRAS:
        sys.exit("usage: lock.py cpu|cuda|agent [PIP OPTION ...]")
    sys.stdout.write(render(resolve(sys.argv[1], sys.argv[2:])))
