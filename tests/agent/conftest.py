"""A scripted server, and an engine over it."""

import asyncio

import pytest

from tests.agent.running_engine import WAIT_S, Running
from tests.agent.scripted_server import ScriptedServer


@pytest.fixture
async def server():
    async with ScriptedServer() as made:
        yield made


@pytest.fixture
async def running(server):
    made = Running(server, patience_s=30.0)
    yield made
    await asyncio.to_thread(made.engine.stop, WAIT_S)
    await made.http.close()
