"""The parts of an encode worker, and its registration at routers."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from connectors.ec.p2p import P2PECConnector
from connectors.testing.contexts import worker_context
from core.config import load_config
from core.ec_connector import ECConnector, EmbeddingsLayout
from core.errors import ConfigError
from core.testing.clock import FakeClock
from core.wire.messages import RegisterEncoder
from core.worker.registration import admission_limits, registration
from encode import worker
from encode.role import EncodeHandler


@pytest.fixture
def put_together(monkeypatch):
    """Assemble a worker whose model files and weights are played."""
    layout = EmbeddingsLayout(hidden_size=2, dtype="float32")
    encoder = SimpleNamespace(layout=layout, model_fingerprint=b"weights", prepared_bytes=lambda num_embeds: num_embeds)
    monkeypatch.setattr(worker, "resolve_model", lambda name, folder: SimpleNamespace(name=name, config={}))
    monkeypatch.setattr(worker, "parse_arch", lambda config: SimpleNamespace(dtype="float32"))
    monkeypatch.setattr(worker, "apply_cpu_threads", lambda section: 1)
    monkeypatch.setattr(worker, "device_of", lambda section: torch.device("cpu"))

    def put(*assignments: str, sees: bool = True):
        def load(files, dtype, device, quantization):
            encoder.model_fingerprint = b"weights" if quantization == "none" else b"other weights"
            return encoder if sees else None

        monkeypatch.setattr(worker, "load_image_encoder", load)
        config = load_config(assignments=["model.served_name=tiny", *assignments])
        context = replace(worker_context("encode", engine_id="e0", incarnation=7), config=config, clock=FakeClock())
        return context, worker.put_together(context)

    return put


@pytest.mark.slow
def test_it_introduces_itself_by_what_it_holds_and_how_it_is_read(put_together):
    context, assembled = put_together("ec_connector.name=p2p", "encode.max_batch_images=3", "worker.max_waiting_requests=5")
    facts = registration(context, assembled, "http://here:1")
    assert isinstance(facts, RegisterEncoder)
    assert (facts.engine_id, facts.incarnation, facts.model) == ("e0", 7, "tiny")
    assert (facts.model_fingerprint, facts.ec_connector, facts.max_num_images) == (b"weights", "p2p", 8)
    assert facts.host_id
    limits = admission_limits(context, assembled)
    assert limits.max_num_seqs + limits.max_waiting_requests == 8
    assert isinstance(assembled.handler, EncodeHandler)
    assert assembled.connector is None
    assembled.built.engine.shutdown()


@pytest.mark.slow
def test_it_is_of_the_model_that_its_readers_quantize(put_together):
    context, assembled = put_together("ec_connector.name=p2p", "model.quantization=int8")
    assert registration(context, assembled, "http://here:1").model_fingerprint == b"other weights"
    assembled.built.engine.shutdown()


def test_a_model_that_reads_text_only_needs_no_encode_worker(put_together):
    with pytest.raises(ConfigError, match="reads text only"):
        put_together("ec_connector.name=p2p", sees=False)


def test_without_a_connector_its_work_could_not_be_read(put_together):
    with pytest.raises(ConfigError, match="no worker could read") as refused:
        put_together()
    assert refused.value.param == "ec_connector.name"


def test_a_factory_that_makes_no_ec_connector_keeps_it_from_starting(put_together, monkeypatch):
    monkeypatch.setattr(worker, "ec_connector_factory", lambda name: lambda context: None)
    with pytest.raises(ConfigError, match=r"ec_connector\.name = 'p2p': its factory returned None.*its side worker") as refused:
        put_together("ec_connector.name=p2p")
    assert refused.value.param == "ec_connector.name"


@pytest.mark.slow
def test_a_connector_that_only_computes_needs_no_scheduler(put_together, monkeypatch):
    class OnlyComputes(ECConnector):
        def __init__(self, context):
            self.worker = P2PECConnector(context).worker

        async def start(self):
            raise NotImplementedError

        async def stop(self):
            raise NotImplementedError

    monkeypatch.setattr(worker, "ec_connector_factory", lambda name: OnlyComputes)
    _context, assembled = put_together("ec_connector.name=p2p")
    assert isinstance(assembled.ec_connector, OnlyComputes)
    assembled.built.engine.shutdown()
