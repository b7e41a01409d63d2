"""Prints what an environment consists of, as a CycloneDX 1.6 document: its Python packages, their licences and wheels' sums.

    python docker/sbom.py docker/requirements-cpu.lock > sbom.cdx.json

Owns the shape of the document. The packages are those installed beside this Python that the lock file lists, and kvferry. It
names no time and no random number, so that equal environments have equal documents. Packages of the base image's system are not
in it: the builder's own scanner lists them (``docker buildx build --sbom=true``).
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
from pathlib import Path
from typing import Any

LOCKED = re.compile(r"^(\S+)==(\S+) --hash=sha256:([0-9a-f]{64})$", re.MULTILINE)


def normalized(name: str) -> str:
    """Return a project's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def component(name: str, version: str, kind: str = "library") -> dict[str, Any]:
    """Return what identifies a package."""
    purl = f"pkg:pypi/{name}@{version.replace('+', '%2B')}"
    return {"type": kind, "bom-ref": purl, "name": name, "version": version, "purl": purl}


def licence(distribution: importlib.metadata.Distribution) -> dict[str, Any]:
    """Return the licence that a package's metadata states, if any."""
    metadata = distribution.metadata
    expression, classifiers = metadata["License-Expression"], metadata.get_all("Classifier") or []
    if expression:
        return {"licenses": [{"expression": expression}]}
    named = [text.rpartition(" :: ")[2] for text in classifiers if text.startswith("License :: ")]
    return {"licenses": [{"license": {"name": name}} for name in named]} if named else {}


def build(lock: str) -> dict[str, Any]:
    """Return the document.

    Raises:
        SystemExit: a package of the lock file is not installed, or in another version.
    """
    installed = {normalized(found.metadata["Name"]): found for found in importlib.metadata.distributions()}
    components = []
    for name, version, digest in LOCKED.findall(lock):
        found = installed.get(normalized(name))
        if found is None or found.version != version:
            raise SystemExit(f"sbom.py: {name} {version} is listed, but {found.version if found else 'nothing'} is installed")
        sums = {"hashes": [{"alg": "SHA-256", "content": digest}]}
        components.append({**component(normalized(name), version), **sums, **licence(found)})
    own = importlib.metadata.version("kvferry")
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": component("kvferry", own, "application")},
        "components": sorted(components, key=lambda one: str(one["name"])),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(build(Path(sys.argv[1]).read_text()), indent=1) + "\n")
