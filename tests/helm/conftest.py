"""The real Helm CLI, the chart's presets rendered by it, and the Kubernetes API's schemas."""

from __future__ import annotations

import functools
import importlib.resources
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import referencing
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "kvferry"
NAMESPACE = "llm"
Manifest = dict[str, Any]


class Helm:
    """Runs the CLI on the chart; what was rendered once is not rendered again."""

    def __init__(self, binary: str) -> None:
        self._binary = binary
        self.manifests = functools.cache(self._manifests)

    def run(self, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run ``helm COMMAND`` with the chart among its arguments."""
        environment = os.environ | {"GOGC": "off"}  # it ends before collections of garbage pay
        command_line = [self._binary, command, *arguments]
        return subprocess.run(command_line, env=environment, capture_output=True, text=True, timeout=60, check=False)

    def template(self, preset: str, kube_version: str = "1.33", sets: Sequence[str] = ()) -> str:
        """Return what a preset renders to."""
        arguments = ["kvferry", str(CHART), "--namespace", NAMESPACE, "--kube-version", kube_version]
        arguments += ["--values", str(CHART / "ci" / f"{preset}-values.yaml")]
        arguments += [part for value in sets for part in ("--set", value)]
        done = self.run("template", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def refusal(self, *sets: str) -> str:
        """Return why the chart refuses these values."""
        arguments = [part for value in sets for part in ("--set", value)]
        done = self.run("template", "kvferry", str(CHART), *arguments)
        assert done.returncode != 0, f"{sets} was accepted"
        return done.stderr

    def _manifests(self, preset: str, *sets: str, kube_version: str = "1.33") -> list[Manifest]:
        documents = yaml.load_all(self.template(preset, kube_version, sets), Loader=yaml.CSafeLoader)
        return [document for document in documents if document is not None]


@pytest.fixture(scope="session")
def helm() -> Helm:
    binary = shutil.which(str(Path(sys.executable).parent / "helm")) or shutil.which("helm")
    assert binary is not None, "the Helm CLI is missing: `make install-test` fetches it"
    return Helm(binary)


@pytest.fixture(scope="session")
def find(helm) -> Callable[..., Manifest]:
    """Return one manifest of a preset by kind and name, without the release's prefix."""

    def look(preset: str, kind: str, name: str, *sets: str) -> Manifest:
        found = {(item["kind"], item["metadata"]["name"]): item for item in helm.manifests(preset, *sets)}
        return found[kind, f"kvferry-{name}" if name else "kvferry"]

    return look


@pytest.fixture(scope="session")
def check_kubernetes() -> Callable[[Manifest, str], None]:
    """Hold a manifest against the strict schema of its kind in a Kubernetes version; unknown kinds and keys are errors."""
    folder = importlib.resources.files("kubernetes_validate") / "kubernetes-json-schema"

    @functools.cache
    def definitions(version: str) -> referencing.Registry[Any]:
        text = (folder / f"v{version}.0-local-strict" / "_definitions.json").read_text()
        return referencing.Resource.from_contents(json.loads(text)) @ referencing.Registry()

    @functools.cache
    def validator(version: str, kind: str, api_version: str) -> jsonschema.Draft202012Validator:
        group, _, name = api_version.rpartition("/")
        prefix = f"{group.partition('.')[0]}-{name}" if group else name
        schema = json.loads((folder / f"v{version}.0-local-strict" / f"{kind.lower()}-{prefix}.json").read_text())
        return jsonschema.Draft202012Validator(schema, registry=definitions(version))

    def check(manifest: Manifest, version: str) -> None:
        validator(version, manifest["kind"], manifest["apiVersion"]).validate(manifest)

    return check
