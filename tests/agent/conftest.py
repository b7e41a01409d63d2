"""A scripted server, and an engine over it."""

import asyncio

import pytest

from tests.agent.running_engine import Running
from tests.agent.scripted_server import ScriptedServer
from tests.support.polling import WAIT_S


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
