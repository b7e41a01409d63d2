"""Two vLLM servers on the CPU as a side of ``disaggregation.py``: a pair with NixlConnector, or two that chunk prompts.

Needs vLLM's environment (``make install-vllm``). Each engine has one thread, bound to a core of its own if there are two, and
eager float32, as ours. In front stands a proxy of ``plain_proxies.py``.
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
from tests.support.vllm_server import VllmServer

MAX_MODEL_LEN = 2304
_NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}


@dataclass(frozen=True, slots=True)
class VllmSide:
    """Two servers. ``chunk``: tokens of a step; of P for a pair."""

    name: str
    chunk: int
    is_aggregated: bool

    @contextmanager
    def running(self, model: str) -> Iterator[str]:
        """Yield the address of the proxy, behind which both serve the model under its name."""
        with ExitStack() as stack:
            folder = Path(stack.enter_context(TemporaryDirectory()))
            files = resolve_model(model, Path(default_cache_dir()))
            servers = []
            for number, (port, side_port) in enumerate(zip(*[iter(free_ports(4))] * 2, strict=True)):
                environment = {
                    "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port),
                    "VLLM_CPU_OMP_THREADS_BIND": str(core(number)),
                }
                log = folder / f"{number}.log"
                server = VllmServer(log, files.path, port, self._arguments(model), environment)
                servers.append(stack.enter_context(server))
            first, second = (server.wait().base_url for server in servers)
            base_url, _ = stack.enter_context(running(IN_TURN if self.is_aggregated else TWO_CALLS, first, second))
            yield base_url

    def _arguments(self, model: str) -> list[str]:
        arguments = {
            "served-model-name": model,
            "dtype": "float32",
            "max-model-len": MAX_MODEL_LEN,
            "max-num-batched-tokens": self.chunk,
        }
        if not self.is_aggregated:
            arguments["kv-transfer-config"] = json.dumps(_NIXL)
        words = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
        return [*words, "--enforce-eager", "--disable-uvicorn-access-log"]


def core(number: int) -> int:
    """Return the core of an engine: the one of this number among those there are."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[number % len(cores)]


NIXL_PAIR = VllmSide("vLLM 1P1D, NixlConnector", UNCHUNKED, False)


def vllm_chunked(chunk: int) -> VllmSide:
    """Return two servers that compute so many tokens of prompts in a step."""
    return VllmSide(f"2 vLLM, {chunk}", chunk, True)
