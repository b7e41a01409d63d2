"""The engine of the EC conformance suite says what it has waited for in vain."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from connectors.testing.ec_engine import ECEngine, NamedImage
from core.request import ECConnectorOutput


@pytest.fixture
def engine():
    """An engine whose connector never reports anything."""
    scheduler = SimpleNamespace(
        ensure_cache_available=lambda request, num_computed_tokens: False,
        take_unavailable_requests=dict,
        build_connector_meta=lambda output: None,
        update_connector_output=lambda output: None,
    )
    worker = SimpleNamespace(
        start_load_caches=lambda cache, metadata: None,
        get_finished=lambda finished: ECConnectorOutput(),
        find_source=lambda identifier: None,
        save_caches=lambda cache, identifier: None,
    )
    return ECEngine(scheduler, worker)


async def test_requests_that_still_wait_are_named(engine):
    request = engine.add("r1", [NamedImage("a"), NamedImage("b")])
    engine.add("r2", [NamedImage("c")])
    engine.ran["r2"] = engine.waiting.pop("r2")
    with pytest.raises(TimeoutError, match=r"after 0.01 s the embeddings of 'r1' are neither loaded nor unavailable: .*log"):
        await engine.run(request, timeout_s=0.01)


async def test_an_image_whose_save_is_not_reported_is_named(engine):
    with pytest.raises(TimeoutError, match=r"after 0.01 s the save of image 'a' has not ended: .*log"):
        await engine.save(NamedImage("a"), timeout_s=0.01)


async def test_another_condition_is_called_one(engine):
    with pytest.raises(TimeoutError, match="the connector has not done what the test waits for"):
        await engine.until(lambda: False, timeout_s=0.01)
