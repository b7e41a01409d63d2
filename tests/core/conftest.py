"""Fixtures of several packages under core."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING

import pytest

from core.model.hub import ModelFiles, read_model_folder
from core.wire.kv import KVHandoff, KVLayoutInfo

if TYPE_CHECKING:  # it takes seconds to import torch and transformers, and most tests need neither
    from tests.support.tiny_smolvlm import ReferenceSmolVLM


@pytest.fixture(scope="session")
def tiny_smolvlm(tmp_path_factory) -> ReferenceSmolVLM:
    """A small model that sees images: its folder, and transformers' own answers."""
    from tests.support.tiny_smolvlm import ReferenceSmolVLM

    return ReferenceSmolVLM(tmp_path_factory.mktemp("tiny-smolvlm"))


@pytest.fixture(scope="session")
def tiny_smolvlm_files(tiny_smolvlm, tmp_path_factory) -> ModelFiles:
    """The same checkpoint as workers and routers find it."""
    return read_model_folder("tiny", tiny_smolvlm.folder, tmp_path_factory.mktemp("cache"))


@pytest.fixture
def handoff() -> KVHandoff:
    """A handoff ``t`` without blocks."""
    layout = KVLayoutInfo(
        dtype="float32", order="HND", block_size=16, num_layers=1, num_kv_heads=1, head_dim=8, block_bytes=1024
    )
    return KVHandoff(
        transfer_id="t",
        engine_id="p0",
        incarnation=1,
        control_address="tcp://127.0.0.1:1",
        model_fingerprint=b"f",
        layout=layout,
        groups=(),
        num_tokens=2,
        lease_ms=1000,
    )


@pytest.fixture
def load_from(monkeypatch):
    """Return a function: what a ``compiled_library`` loads if a given file stands in for the one that was built."""

    def load(compiled_library, path):
        spec = ModuleSpec("library", None, origin=str(path))
        with monkeypatch.context() as patch:
            patch.setattr("importlib.util.find_spec", lambda name, package=None: spec)
            return getattr(compiled_library, "__wrapped__", compiled_library)()

    return load
