import os
import subprocess
import sys
from pathlib import Path

import pytest

from core.testing.transport_suite import TransportSuite

FACTORIES = Path(__file__).with_name("transport_factories.py")
OVER_TCP = Path(__file__).with_name("nixl_over_tcp.py")


class TestNixlTransport(TransportSuite):
    factory = f"{FACTORIES}:make_nixl"


@pytest.mark.slow
def test_the_suite_passes_over_tcp_between_owner_and_reader():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "60", str(OVER_TCP)]
    environment = os.environ | {"UCX_TLS": "tcp"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stdout
