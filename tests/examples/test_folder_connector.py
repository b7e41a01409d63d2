"""The example of a connector of one's own: handoffs through files, on a small engine and in a real cluster."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
import pytest

from connectors.testing.connector_engine import ConnectorEngine
from connectors.testing.connector_pair import FINGERPRINT, LAYOUT, PROMPT
from connectors.testing.connector_suite import ConnectorConformance
from connectors.testing.contexts import connector_context
from core.config_workers import ConnectorSection
from core.errors import ConfigError, ConnectorUnavailable, EngineDead
from kvferry.local import LocalCluster

pytestmark = pytest.mark.slow

RECORD_BYTES = LAYOUT.block_bytes + 16  # a block and its digest


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "kv"


@dataclass
class Peer:
    engine: ConnectorEngine
    connector: object

    def load(self, request_id, prompt, handoff):
        request = self.engine.add(request_id, prompt, handoff)
        self.engine.admit(request)
        return request

    async def outcome(self, request_id):
        await self.engine.until(lambda: self.engine.loads[request_id].is_ended)
        return self.engine.loads[request_id]


@pytest.fixture
def context(folder):
    def make(role, **settings):
        section = ConnectorSection(name="folder", **({"extra": {"folder": str(folder)}} | settings))
        return connector_context(role, connector=section)

    return make


@pytest.fixture
def peer(folder_connector, context):
    """Start a connector with an engine without a model."""

    @asynccontextmanager
    async def start(role, **settings):
        connector = folder_connector.FolderConnector(context(role, **settings))
        engine = ConnectorEngine(connector.scheduler, connector.worker, FINGERPRINT, LAYOUT)
        await connector.start()
        try:
            yield Peer(engine, connector)
        finally:
            await connector.stop()
            engine.close()

    return start


class TestConformance(ConnectorConformance):
    """The suite that every connector passes. Blocks are free once they are written: a file does not need them."""

    holds_until_read = False

    @pytest.fixture(autouse=True)
    def _parts(self, folder_connector, context, folder):
        self.module, self.context, self.folder = folder_connector, context, folder

    def make_connector(self, role, patience_s):
        return self.module.FolderConnector(self.context(role, transfer_deadline_s=patience_s))

    def damage(self, pair, handoff, position):
        path = self.module.file_of(self.folder, handoff.transfer_id)
        content = bytearray(path.read_bytes())
        content[position * RECORD_BYTES + 5] ^= 1
        path.write_bytes(content)

    async def lose_backend(self, pair):
        shutil.rmtree(self.folder)
        self.folder.write_text("a file")


async def test_reader_waits_for_a_file_that_is_not_written_yet(peer):
    async with peer("prefill") as prefill, peer("decode") as decode:
        handoff = prefill.engine.prefill("a", PROMPT)  # its file is written in the next step
        request = decode.load("a", PROMPT, handoff)
        decode.engine.step()
        assert not decode.engine.loads["a"].is_ended
        await prefill.engine.until(lambda: not prefill.engine.parked)
        assert (await decode.outcome("a")).error is None
        assert decode.engine.has_content(request)


async def test_a_file_that_never_comes_fails_the_load_at_its_deadline(peer):
    async with peer("prefill") as prefill, peer("decode", transfer_deadline_s=0.05) as decode:
        decode.load("a", PROMPT, prefill.engine.prefill("a", PROMPT))
        assert (await decode.outcome("a")).error.code == "deadline"
        assert decode.engine.num_used_blocks == 0


async def damaged(prefill, folder, damage):
    """Return the handoff of a prompt of four blocks whose file is changed by ``damage``."""
    handoff = prefill.engine.prefill("a", PROMPT)
    await prefill.engine.until(lambda: not prefill.engine.parked)
    (path,) = folder.glob("*.kv")
    path.write_bytes(damage(bytearray(path.read_bytes())))
    return handoff


async def test_block_with_other_bytes_than_were_written_is_bad_and_the_others_are_good(peer, folder):
    def flip_a_bit(content):
        content[2 * RECORD_BYTES + 5] ^= 1
        return content

    async with peer("prefill") as prefill, peer("decode") as decode:
        decode.engine.checks_content = True
        decode.load("a", PROMPT, await damaged(prefill, folder, flip_a_bit))
        outcome = await decode.outcome("a")
        assert (outcome.error.code, outcome.bad) == ("digest", {2})
        assert outcome.usage.verified_blocks == 3
        assert decode.engine.num_used_blocks == 0


async def test_blocks_after_the_end_of_a_file_that_was_cut_are_bad(peer, folder):
    async with peer("prefill") as prefill, peer("decode") as decode:
        decode.load("a", PROMPT, await damaged(prefill, folder, lambda content: content[: 2 * RECORD_BYTES]))
        outcome = await decode.outcome("a")
        assert (outcome.error.code, outcome.bad) == ("digest", {2, 3})
        assert decode.engine.num_used_blocks == 0


async def test_release_deletes_the_file_and_renewal_keeps_it(peer, folder):
    async with peer("decode", lease_s=60.0) as worker:  # prefill workers clear the folder themselves
        handoffs = [worker.engine.prefill(name, [*PROMPT, ord(name)]) for name in "abc"]
        await worker.engine.until(lambda: not worker.engine.parked)
        for path in folder.glob("*.kv"):
            os.utime(path, (0, 0))
        worker.connector.renew([handoffs[0].transfer_id, "unknown"])
        worker.connector.release([handoffs[1].transfer_id, "unknown"])
        await worker.connector.stop()  # after its orders
        assert len(list(folder.glob("*.kv"))) == 2
        worker.connector.worker.clear()
        (left,) = folder.glob("*.kv")
        assert left.stat().st_mtime > 0
    assert list(folder.iterdir()) == [left]


async def test_an_id_with_a_path_stays_in_the_folder(folder_connector, folder):
    assert folder_connector.file_of(folder, "../../etc/passwd").parent == folder


async def test_a_dead_thread_ends_the_engine(peer):
    async with peer("prefill") as prefill, peer("decode") as decode:
        handoff = prefill.engine.prefill("a", PROMPT)
        await prefill.engine.until(lambda: not prefill.engine.parked)
        decode.connector.worker.blocks = None
        decode.load("a", PROMPT, handoff)
        with pytest.raises(EngineDead, match="AttributeError"):
            await decode.engine.until(lambda: False)


def test_a_missing_folder_is_a_configuration_error(folder_connector, context):
    with pytest.raises(ConfigError, match=r"connector\.extra\.folder"):
        folder_connector.FolderConnector(context("prefill", extra={}))


async def test_a_folder_that_cannot_be_made_is_reported_at_start(folder_connector, context, folder):
    folder.write_text("a file")
    with pytest.raises(ConnectorUnavailable, match=r"connector\.extra\.folder"):
        await folder_connector.FolderConnector(context("prefill")).start()


AS_ONE_WORKER_GOES_ON = " port of Southampton and travels across the Atlantic"


@pytest.mark.slow
@pytest.mark.e2e
def test_installed_package_serves_a_cluster(examples_dir, tmp_path, folder, cluster_config, monkeypatch, eventually):
    source, site = tmp_path / "source", tmp_path / "site"
    shutil.copytree(examples_dir / "folder_connector", source, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--target", site, source], check=True, timeout=120)
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.syspath_prepend(site)  # settings are checked here, before any worker starts
    settings = (
        "connector.name=folder",
        f"connector.extra.folder={folder}",
        "connector.lease_s=3",
        "connector.lease_renew_interval_s=1",
    )
    with LocalCluster(cluster_config(*settings)) as cluster:
        body = {"model": "smollm2-135m", "prompt": "The ferry leaves the", "max_tokens": 8, "temperature": 0, "n": 2}
        response = httpx.post(f"{cluster.base_url}/v1/completions", json=body, timeout=120)
        assert response.status_code == 200, response.text
        eventually(lambda: not list(folder.glob("*.kv")), "end of the lease")
    answer = response.json()
    assert answer["usage"]["kv_transfer"]["transport"] == "folder"
    assert [choice["text"] for choice in answer["choices"]] == [AS_ONE_WORKER_GOES_ON] * 2
