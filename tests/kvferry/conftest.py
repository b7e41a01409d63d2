from __future__ import annotations

import socket

import pytest


@pytest.fixture
def listener():
    """A port of loopback where something listens."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        yield found.getsockname()[1]
