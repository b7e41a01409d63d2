"""Shared memory is used where it is proven, not where names suggest it: else blocks come by tcp, and the log says why."""

from __future__ import annotations

import msgspec
import pytest

from connectors.p2p.connector import P2PConnector
from connectors.p2p.transport.factory import create_transport
from connectors.p2p.transport.shm import ShmTransport
from connectors.p2p.transport.shm_metadata import TOKEN_BYTES, ShmMetadata
from connectors.testing.connector_pair import PROMPT, Pair, Side
from connectors.testing.contexts import connector_context
from core.config_workers import ConnectorSection


class LyingTransport(ShmTransport):
    """Makes false claims about its memory: as if the names were right but belonged to another process."""

    def __init__(self, ids, **lies):
        super().__init__(ids)
        self.lies = lies

    def describe(self):
        truth = msgspec.msgpack.decode(super().describe(), type=ShmMetadata)
        return msgspec.msgpack.encode(msgspec.structs.replace(truth, **self.lies))


LIES = {
    "another token": ({"token": bytes(TOKEN_BYTES)}, "is not the one that described its memory"),
    "another descriptor": ({"token_fd": 1_000_000}, "cannot map the memory"),
    "another process": ({"pid": 1}, "cannot map the memory|is not the one|process 1 is gone"),
}


@pytest.fixture
async def make_pair():
    """Two real connectors that prefer shared memory, on one host as far as they say; the producer's proof may be wrong."""
    sides = {}

    async def make(lies):
        for role in ("prefill", "decode"):
            context = connector_context(role, connector=ConnectorSection(transports=("shm", "tcp")))

            def create(name, settings, role=role):
                is_liar = name == "shm" and role == "prefill"
                return LyingTransport(settings.ids, **lies) if is_liar else create_transport(name, settings)

            sides[role] = Side(role, P2PConnector(context, create))
            await sides[role].connector.start()
        return Pair(sides["prefill"], sides["decode"])

    yield make
    for side in sides.values():
        await side.close()


async def load_one(pair):
    handoff = pair.producer.engine.prefill("r", PROMPT)
    request = pair.load("r", PROMPT, handoff)
    await pair.ended("r")
    outcome = pair.consumer.engine.loads["r"]
    assert outcome.error is None
    assert pair.consumer.engine.has_content(request)
    return outcome


def transports_in_effect(caplog):
    """Return the lines of the reader that say by what it reads."""
    lines = [record.getMessage() for record in caplog.records]
    return [line for line in lines if line.startswith("event=kv_transport ") and "peer=" in line]


@pytest.mark.parametrize(("lies", "why"), LIES.values(), ids=LIES)
async def test_without_proof_blocks_are_read_over_tcp_and_the_log_gives_the_reason(make_pair, lies, why, caplog):
    caplog.set_level("INFO")
    pair = await make_pair(lies)
    outcome = await load_one(pair)
    assert outcome.usage.transport == "tcp"
    (line,) = transports_in_effect(caplog)
    assert "transport=tcp" in line
    assert "instead_of=" in line
    _, reason = line.split("instead_of=")
    assert reason.startswith('"shm: ')
    assert any(part in reason for part in why.split("|"))


async def test_with_proof_memory_is_shared_and_nothing_else_is_said(make_pair, caplog):
    caplog.set_level("INFO")
    outcome = await load_one(await make_pair({}))
    assert outcome.usage.transport == "shm"
    (line,) = transports_in_effect(caplog)
    assert "transport=shm" in line
    assert "instead_of" not in line
