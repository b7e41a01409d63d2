"""Two vLLM servers on the CPU as a side of ``disaggregation.py``: a pair with a KV connector, or two that chunk prompts.

Needs vLLM's environment (``make install-vllm``). Each engine has one thread, bound to a core of its own if there are two, and
eager float32, as ours. In front stands a proxy of ``plain_proxies.py``. A pair hands every prompt off, or the request fails.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from cluster_sides import UNCHUNKED
from plain_proxies import IN_TURN, TWO_CALLS, running

sys.path.insert(0, str(Path(__file__).parents[1]))

from core.config_types import default_cache_dir
from core.model.hub import resolve_model
from kvferry.cluster_plan import free_ports
from tests.support.plugin_wheel import build_wheel, unpack_wheel
from tests.support.vllm_pair import CPU_LAYOUT
from tests.support.vllm_server import VllmServer

MAX_MODEL_LEN = 2304


@dataclass(frozen=True, slots=True)
class VllmSide:
    """Two servers: a pair if they have a ``connector``, vLLM's own or ours. ``chunk``: tokens of a step; of P for a pair."""

    name: str
    chunk: int
    connector: str = ""

    @contextmanager
    def running(self, model: str) -> Iterator[str]:
        """Yield the address of the proxy, behind which both serve the model under its name.

        Raises:
            StartFailed: a server has ended, or does not serve in time.
        """
        with ExitStack() as stack:
            folder = Path(stack.enter_context(TemporaryDirectory()))
            files = resolve_model(model, Path(default_cache_dir()))
            ports = free_ports(4)
            environment = self._environment(folder)
            servers = []
            for number, (port, side_port) in enumerate(zip(ports[::2], ports[1::2], strict=True)):
                own = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port), "VLLM_CPU_OMP_THREADS_BIND": str(core(number))}
                arguments = self._arguments(model, side_port)
                server = VllmServer(folder / f"{number}.log", files.path, port, arguments, environment | own)
                servers.append(stack.enter_context(server))
            first, second = (server.wait().base_url for server in servers)
            base_url, _ = stack.enter_context(running(TWO_CALLS if self.connector else IN_TURN, first, second))
            yield base_url

    def _environment(self, folder: Path) -> dict[str, str]:
        if self.connector != OURS:
            return {}
        unpacked = unpack_wheel(build_wheel(folder / "built"), folder / "unpacked")
        return {"PYTHONPATH": os.pathsep.join(map(str, (unpacked, CPU_LAYOUT)))}

    def _arguments(self, model: str, side_port: int) -> list[str]:
        arguments = {
            "served-model-name": model,
            "dtype": "float32",
            "block-size": 32,
            "max-model-len": MAX_MODEL_LEN,
            "max-num-batched-tokens": self.chunk,
        }
        if self.connector:
            config = {"kv_connector": self.connector, "kv_role": "kv_both", "kv_load_failure_policy": "fail"}
            extra = {"kv_connector_extra_config": {"kvferry.port": side_port}} if self.connector == OURS else {}
            arguments["kv-transfer-config"] = json.dumps(config | extra)
        words = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
        return [*words, "--enforce-eager", "--disable-uvicorn-access-log"]


def core(number: int) -> int:
    """Return the core of an engine: the one of this number among those there are."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[number % len(cores)]


OURS = "KvferryConnector"
PAIRS = (VllmSide("vLLM 1P1D, kvferry", UNCHUNKED, OURS), VllmSide("vLLM 1P1D, NixlConnector", UNCHUNKED, "NixlConnector"))


def vllm_chunked(chunk: int) -> VllmSide:
    """Return two servers that compute so many tokens of prompts in a step."""
    return VllmSide(f"2 vLLM, {chunk}", chunk)
