"""A tier that does not hold one block of the model is found before any process starts."""

from __future__ import annotations

import json

import pytest

from core.config import load_config
from core.errors import ConfigError
from core.model.arch import parse_arch
from kvferry import LocalCluster, doctor_checks
from kvferry.cluster_plan import workers_here
from kvferry.preflight import check_model, check_process
from kvferry.processes import ProcessKeeper
from tests.kvferry.findings import OF_ANY_PROCESS, verdicts
from tests.kvferry.test_doctor_model import TINY_LLAMA

BLOCK_BYTES = 64 * 2 * 16 * 4
STORE = ("connector.name=store",)
SHARED = (*STORE, "local.kvstore=true")
OFFLOAD = ("connector.name=multi", "connector.connectors=[p2p, offload]")
DISK = ("kvstore.disk_path=/nowhere", "kvstore.disk_segment_bytes=64MiB")
TOO_SMALL = [
    ((*SHARED, "kvstore.memory_bytes=4KiB"), "kvstore.memory_bytes", "set it to at least "),
    ((*STORE, "kvstore.memory_bytes=4KiB"), "kvstore.memory_bytes", "set it to at least "),
    ((*SHARED, *DISK, "kvstore.disk_bytes=8KiB"), "kvstore.disk_bytes", "or leave kvstore.disk_path out"),
    ((*OFFLOAD, "connector.offload.memory_bytes=4KiB"), "connector.offload.memory_bytes", "set it to at least "),
]


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    return ("model.device=cpu", f"model.name={tmp_path}")


@pytest.mark.parametrize(("settings", "setting", "fix"), TOO_SMALL)
def test_tier_that_holds_no_block_is_refused_with_the_least_that_will_do(settings, setting, fix, model, monkeypatch):
    monkeypatch.setattr("kvferry.preflight.check_folders", lambda *_: None)
    started = []
    monkeypatch.setattr(ProcessKeeper, "start", lambda _keeper, spec: started.append(spec.name))
    with pytest.raises(
        ConfigError, match=f"^{setting} = .* does not hold one block of {BLOCK_BYTES} bytes: .*{fix}"
    ) as refused:
        LocalCluster(load_config(assignments=[*settings, *model, "router.port=0"])).start()
    assert (started, refused.value.param) == ([], setting)
    found = verdicts(doctor_checks.check_model, *settings, *model)["model"]
    assert (found.verdict, found.text) == ("failure", refused.value.message)
    assert verdicts(doctor_checks.check_model, *settings, *model, OF_ANY_PROCESS)["model"].verdict == "warning"
    least = refused.value.message.partition("at least ")[2].partition(",")[0]
    check_model(parse_arch(TINY_LLAMA), workers_here(load_config(assignments=[*settings, *model, f"{setting}={least}"])))


@pytest.mark.parametrize(
    "settings",
    [
        ("kvstore.memory_bytes=4KiB",),
        (*STORE, "kvstore.memory_bytes=4KiB", "kvstore.address=tcp://s:5580"),
        (*STORE, "kvstore.disk_bytes=8KiB"),
        ("connector.offload.memory_bytes=4KiB",),
    ],
)
def test_tier_that_is_elsewhere_or_not_in_use_is_not_judged(settings, model):
    check_model(parse_arch(TINY_LLAMA), workers_here(load_config(assignments=[*settings, *model])))


def test_a_single_worker_is_not_judged_by_the_store_of_serve(model):
    elsewhere = [*SHARED, "kvstore.address=tcp://10.0.0.9:5580", "kvstore.memory_bytes=4KiB"]
    settings = [*elsewhere, *model, "worker.ops_port=0", "worker.control_address=tcp://127.0.0.1:0"]
    check_process("prefill", load_config(assignments=settings))
    found = verdicts(doctor_checks.check_model, *settings, "worker.engine_id=p0")["model"]
    assert "tokenizer.json" in found.text, "it is no whole model, and nothing else is wrong"


def test_blocks_of_a_store_are_compared_with_those_of_the_model(model):
    def check(size):
        check_model(
            parse_arch(TINY_LLAMA), workers_here(load_config(assignments=[*SHARED, *model, f"kvstore.block_bytes={size}"]))
        )

    check(BLOCK_BYTES)
    check(2 * BLOCK_BYTES)
    with pytest.raises(ConfigError, match=rf"^kvstore\.block_bytes = 4096: the model's blocks have {BLOCK_BYTES} bytes;"):
        check(4096)


def test_store_that_knows_its_blocks_holds_one_or_does_not_start():
    settings = ["kvstore.bind_address=tcp://127.0.0.1:0", "kvstore.memory_bytes=1MiB"]
    check_process("kvstore", load_config(assignments=settings))
    settings.append("kvstore.block_bytes=2MiB")
    with pytest.raises(ConfigError, match=r"^kvstore\.memory_bytes = 1048576 does not hold one block of 2097152 bytes"):
        check_process("kvstore", load_config(assignments=settings))
    for run_by, verdict in (
        ("local.kvstore=true", "failure"),
        ("worker.engine_id=x", "warning"),
        (OF_ANY_PROCESS, "warning"),
        ("log.level=INFO", "warning"),
    ):
        found = verdicts(doctor_checks.check_store, *settings, run_by)["store"]
        assert (found.verdict, "kvstore.memory_bytes" in found.text) == (verdict, True)
    assert verdicts(doctor_checks.check_store, *settings, "kvstore.memory_bytes=3MiB") == {}
