"""Types that several threads read at once are known to msgspec before."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Prints the types of which msgspec learns only when a value is read; a process of its own, as it learns of each once.
PROGRAM = """
import sys
from importlib import import_module
import msgspec
kind = getattr(import_module(sys.argv[1]), sys.argv[2])
found = []

def note(frame, what, _):
    if what == "call" and frame.f_code.co_name == "get_class_annotations":
        found.append(frame.f_locals["obj"].__name__)

sys.setprofile(note)
try:
    msgspec.convert({}, kind)
except msgspec.ValidationError:
    pass
sys.setprofile(None)
sys.exit(", ".join(found) or 0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("core.config", "KVFerryConfig"),
        ("core.grammar.limits", "StructuralTag"),
        ("connectors.ec.p2p_adapter", "HeldEmbeddings"),
        ("connectors.p2p.transport.shm_metadata", "ShmMetadata"),
        ("connectors.p2p.transport.tcp_server", "TcpMetadata"),
        ("connectors.p2p.transport.tcp_server", "ChunkRequest"),
        ("connectors.p2p.transport.tcp_server", "ChunkHeader"),
        ("connectors.p2p.transport.nixl", "NixlMetadata"),
    ],
)
def test_nothing_is_collected_at_the_first_use(module, name):
    run = subprocess.run([sys.executable, "-c", PROGRAM, module, name], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
