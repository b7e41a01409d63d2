"""The command lines, settings and hooks that the Helm chart renders run a real cluster."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import yaml

from core.config_types import default_cache_dir
from core.ids import RandomIds
from core.wire.curve import new_cluster_key
from kvferry.cluster_plan import free_ports

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.usefixtures("no_child_left")]

CHART = Path(__file__).parents[2] / "helm" / "kvferry"
UCX_PORTS = range(20_000, 20_128)  # the chart's default
PORTS = ("http", "workers", "control", "data", "ops", "store", "storeOps")
ROUTERS = "kvferry-router-workers.llm.svc.cluster.local"
SETTINGS = (
    "security.clusterKey.existingSecret=kvferry-cluster",
    "config.cache.memory_bytes=536870912",
    "config.worker.drain_timeout_s=20",
    "prefill.resources.requests.cpu=1",
    "config.connector.name=multi",
    "config.connector.connectors={p2p,store}",
    "kvstore.enabled=true",
    "kvstore.mode=sidecar",
    "config.kvstore.memory_bytes=134217728",
)
STORE = "kvstore"  # in the pod of prefill-0; here it serves both pods


@dataclass(slots=True)
class Container:
    """A container of a role and its settings, for a machine without Kubernetes."""

    args: list[str]
    pre_stop: list[str]
    readiness_path: str


def ports_beside_ucx(count: int) -> list[int]:
    """Return free ports that are not among those of ``ports.ucx``, which the chart keeps for UCX."""
    return [port for port in free_ports(count + 20) if port not in UCX_PORTS][:count]


class Installed:
    """Runs what the chart renders, with names and addresses of this machine in it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = new_cluster_key(RandomIds())
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.container = functools.cache(self._container)
        self.ports: dict[str, dict[str, int]] = {}
        shared = dict(zip(PORTS, ports_beside_ucx(len(PORTS)), strict=True))
        for role in ("router", "prefill", "decode", STORE):
            self.ports[role] = shared | {"ops": ports_beside_ucx(1)[0]}  # pods have one each, here they share a machine

    def _container(self, role: str) -> Container:
        """Render the chart, and return what it says of a role."""
        helm = shutil.which(str(Path(sys.executable).parent / "helm")) or "helm"
        sets = [*SETTINGS, *(f"ports.{name}={port}" for name, port in self.ports[role].items())]
        command = [helm, "template", "kvferry", str(CHART), "--namespace", "llm"]
        text = subprocess.run(
            [*command, *(part for value in sets for part in ("--set", value))], capture_output=True, text=True, check=True
        ).stdout
        manifests = {(item["kind"], item["metadata"]["name"]): item for item in yaml.safe_load_all(text) if item}
        pod = "prefill" if role == STORE else role
        file = "kvstore.yaml" if role == STORE else "config.yaml"
        settings = manifests["ConfigMap", f"kvferry-{pod}"]["data"][file]
        path = self._folder / f"{role}.yaml"
        path.write_text(
            settings.replace(ROUTERS, "127.0.0.1")
            .replace("0.0.0.0", "127.0.0.1")
            .replace("/var/cache/kvferry", default_cache_dir())
        )
        spec = manifests["Deployment", f"kvferry-{pod}"]["spec"]["template"]["spec"]
        (found,) = (one for one in (*spec.get("initContainers", ()), *spec["containers"]) if one["name"] == role)
        here = {f"/etc/kvferry/{file}": str(path), "$(POD_NAME)": f"{role}-0", "$(POD_IP)": "127.0.0.1"}
        return Container(
            args=[here.get(argument, argument) for argument in found["args"]],
            pre_stop=found.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", []),
            readiness_path=found.get("readinessProbe", found["startupProbe"])["httpGet"]["path"],
        )

    def start(self, role: str) -> None:
        environment = os.environ | {"KVFERRY_CLUSTER_KEY": self._key}
        command = [sys.executable, "-P", "-m", "kvferry", *self.container(role).args]
        with (self._folder / f"{role}.log").open("wb") as log:
            self._processes[role] = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run one of kvferry's commands."""
        return subprocess.run(
            [sys.executable, "-P", "-m", "kvferry", *command], capture_output=True, text=True, timeout=120, check=False
        )

    def is_ready(self, role: str) -> bool:
        assert self._processes[role].poll() is None, (self._folder / f"{role}.log").read_text()[-2000:]
        port = self.ports[role][{"router": "http", STORE: "storeOps"}.get(role, "ops")]
        try:
            return httpx.get(f"http://127.0.0.1:{port}{self.container(role).readiness_path}").status_code == 200
        except httpx.TransportError:
            return False

    def wait(self, role: str) -> int:
        return self._processes[role].wait(timeout=60)

    def stop(self) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture
def installed(tmp_path):
    found = Installed(tmp_path)
    yield found
    found.stop()


def test_rendered_chart_serves_by_verified_handoff_and_drains(installed, eventually):
    installed.start(STORE)  # a native sidecar: the worker begins when it is up
    eventually(lambda: installed.is_ready(STORE), "a ready store", 60.0)
    for role in ("router", "prefill", "decode"):
        installed.start(role)
    eventually(lambda: installed.is_ready("router"), "a ready router", 120.0)
    probe = installed.run("probe", f"http://127.0.0.1:{installed.ports['router']['http']}", "--expect-handoff")
    assert probe.returncode == 0, probe.stderr
    assert "transferred and verified by tcp" in probe.stdout
    metrics = httpx.get(f"http://127.0.0.1:{installed.ports[STORE]['storeOps']}/metrics").text
    assert "kvferry_kvstore_local_clients 2.0" in metrics  # both workers map its arena
    for role in ("prefill", "decode"):
        program, *arguments = installed.container(role).pre_stop
        assert program == "kvferry"
        hook = installed.run(*arguments)
        assert (hook.returncode, hook.stdout) == (0, "the worker has left\n")
        assert installed.wait(role) == 0
