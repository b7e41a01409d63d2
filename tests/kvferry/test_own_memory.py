"""A single process checks its memory before it takes it: the kernel would kill it, or others, without a word."""

from __future__ import annotations

import pytest

from core.config import load_config
from core.errors import ConfigError
from core.memory_file import HugePageStock
from kvferry import preflight, reserved_memory
from kvferry.preflight import check_process

GIB = 1 << 30
ANY_PORT = [
    "worker.ops_port=0",
    "worker.control_address=tcp://127.0.0.1:0",
    "kvstore.bind_address=tcp://127.0.0.1:0",
    "kvstore.ops_port=0",
    "model.name=never-fetched/model",
]

OFFLOAD = ("cache.memory_bytes=1GiB", "connector.name=offload")


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A processor without a GPU, and a container of 2 GiB."""
    monkeypatch.setattr(reserved_memory, "why_no_cuda", lambda: "none")
    monkeypatch.setattr(preflight, "memory_limit_bytes", lambda: 2 * GIB)


@pytest.mark.parametrize(
    ("role", "assignments", "setting", "text"),
    [
        (
            "prefill",
            ["cache.memory_bytes=2GiB"],
            "cache.memory_bytes",
            r"2 GiB \(1 KV pool of 2 GiB: 2 GiB\), and there are 2 GiB",
        ),
        ("decode", ["connector.name=store", "kvstore.memory_bytes=3GiB"], "kvstore.memory_bytes", "reserves 4 GiB"),
        ("aggregated", [*OFFLOAD, "connector.offload.memory_bytes=5GiB"], "connector.offload.memory_bytes", "reserves 6 GiB"),
        ("kvstore", ["kvstore.memory_bytes=900GiB"], "kvstore.memory_bytes", "reserves 900 GiB"),
    ],
)
def test_process_that_reserves_more_than_there_is_names_the_setting(role, assignments, setting, text):
    with pytest.raises(ConfigError, match=text) as raised:
        check_process(role, load_config(assignments=[*ANY_PORT, *assignments]))
    assert raised.value.param == setting
    assert raised.value.message.startswith(f"{setting}: this process reserves")


@pytest.mark.parametrize(
    ("role", "assignments"),
    [
        ("prefill", ["cache.memory_bytes=1GiB"]),
        ("decode", ["connector.name=store", "kvstore.address=tcp://s:1", "kvstore.memory_bytes=9GiB"]),
        ("decode", ["local.kvstore=true", "kvstore.memory_bytes=9GiB"]),  # the local store is another process
        ("decode", ["cache.memory_bytes=9GiB", "model.device=cuda"]),
        ("encode", ["cache.memory_bytes=9GiB", "ec_connector.name=p2p"]),
        ("kvstore", ["cache.memory_bytes=9GiB", "connector.name=store"]),
        ("router", ["cache.memory_bytes=9GiB", "router.port=0", "router.worker_address=tcp://127.0.0.1:0"]),
    ],
)
def test_only_what_the_process_itself_reserves_counts(role, assignments, monkeypatch):
    monkeypatch.setattr(preflight, "check_device", lambda config: None)
    check_process(role, load_config(assignments=[*ANY_PORT, *assignments]))


def test_huge_pages_are_set_aside_already(monkeypatch):
    monkeypatch.setattr(reserved_memory, "huge_page_stock", lambda: HugePageStock(2 << 20, 4096, 4096))
    settings = ["kvstore.memory_bytes=3GiB", "kvstore.huge_pages=always"]
    check_process("kvstore", load_config(assignments=[*ANY_PORT, *settings]))
