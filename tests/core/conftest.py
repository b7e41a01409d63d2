"""Fixtures of several packages under core."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from core.model.hub import ModelFiles, read_model_folder

if TYPE_CHECKING:  # it takes seconds to import torch and transformers, and most tests need neither
    from core.testing.tiny_smolvlm import ReferenceSmolVLM


@pytest.fixture(scope="session")
def tiny_smolvlm(tmp_path_factory) -> ReferenceSmolVLM:
    """A small model that sees images: its folder, and transformers' own answers."""
    from core.testing.tiny_smolvlm import ReferenceSmolVLM

    return ReferenceSmolVLM(tmp_path_factory.mktemp("tiny-smolvlm"))


@pytest.fixture(scope="session")
def tiny_smolvlm_files(tiny_smolvlm, tmp_path_factory) -> ModelFiles:
    """The same checkpoint as workers and routers find it."""
    return read_model_folder("tiny", tiny_smolvlm.folder, tmp_path_factory.mktemp("cache"))
