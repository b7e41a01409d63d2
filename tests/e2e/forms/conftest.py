"""One prefill and two decode workers of a tiny random model that can spell any text; what it puts out, a grammar decides."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvferry.local import LocalCluster
from tests.support.json_model import write_json_model

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{% for m in messages %}{{ m.content }} {% endfor %}"
)


@pytest.fixture(scope="package")
def served(cluster_config, serve, tmp_path_factory, eventually) -> Iterator[Any]:
    """The cluster and a client for it. ``kill_busy_decode_worker`` also waits for the successor."""
    folder = write_json_model(tmp_path_factory.mktemp("json-model"))
    tokenizer = folder / "tokenizer_config.json"
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | {"chat_template": TEMPLATE}))
    settings = (f"model.name={folder}", "connector.transports=[shm]", "local.num_prefill=1", "local.num_decode=2")
    logs = tmp_path_factory.mktemp("forms")
    with (
        LocalCluster(cluster_config(*settings), supervise=True, log_dir=logs) as cluster,
        serve("forms", cluster) as found,
    ):
        yield found
        eventually(lambda: not found.held(), f"release of {found.held()}")


@pytest.fixture
def kill_busy_decode_worker(served) -> Iterator[Callable[[], None]]:
    """Kill the decode worker that has a request; before the next test its successor is ready."""

    def kill() -> None:
        names = ("decode-0", "decode-1")
        busy = [name for name in names if served.gauges(name)["kvferry_num_requests_running"]]
        assert len(busy) == 1, f"one decode worker should have the request: busy are {busy}"
        served.cluster.kill(busy[0])

    yield kill
    served.cluster.wait_until_ready()
