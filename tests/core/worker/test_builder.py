"""What a connector's factory makes is looked at before a worker serves: without a connector it would serve alone."""

from __future__ import annotations

import re

import pytest

from connectors.ec.p2p import P2PECConnector
from connectors.p2p.connector import P2PConnector
from connectors.testing.connector_pair import FINGERPRINT, LAYOUT
from connectors.testing.contexts import connector_context, worker_context
from core.config_workers import ConnectorSection, ECConnectorSection
from core.connector import Connector
from core.ec_connector import ECConnector
from core.errors import ConfigError
from core.worker import builder


class WithoutSides(Connector):
    def __init__(self, context):
        pass


class WithoutWorker(P2PConnector):
    def __init__(self, context):
        super().__init__(context)
        self.worker = None


@pytest.mark.parametrize(
    ("factory", "problem"),
    [
        (lambda context: None, "its factory returned None"),
        (lambda context: P2PConnector, "its factory returned <class"),
        (WithoutSides, "WithoutSides has no scheduler and no worker"),
        (WithoutWorker, "WithoutWorker has no worker"),
    ],
    ids=["nothing", "a class", "no sides", "one side"],
)
def test_a_factory_that_makes_no_connector_keeps_the_worker_from_starting(monkeypatch, factory, problem):
    def build_engine(config, clock, make_connector, *others, **options):
        make_connector(LAYOUT, FINGERPRINT)
        raise AssertionError("the worker would serve")

    monkeypatch.setattr(builder, "build_engine", build_engine)
    context = worker_context("prefill", connector=ConnectorSection(name="mine"))
    with pytest.raises(ConfigError, match=rf"connector\.name = 'mine': {re.escape(problem)}.*must return") as refused:
        builder.assemble(context, lambda facts: None, factory, None)
    assert refused.value.param == "connector.name"


class ECWithoutSides(ECConnector):
    def __init__(self, context):
        pass

    async def start(self):
        raise NotImplementedError

    async def stop(self):
        raise NotImplementedError


class ECWithoutScheduler(P2PECConnector):
    def __init__(self, context):
        super().__init__(context)
        self.scheduler = None


@pytest.mark.parametrize(
    ("factory", "problem"),
    [
        (lambda context: None, "its factory returned None"),
        (lambda context: P2PECConnector, "its factory returned <class"),
        (ECWithoutSides, "ECWithoutSides has no scheduler and no worker"),
        (ECWithoutScheduler, "ECWithoutScheduler has no scheduler"),
    ],
    ids=["nothing", "a class", "no sides", "one side"],
)
def test_a_factory_that_makes_no_ec_connector_keeps_the_worker_from_starting(monkeypatch, factory, problem):
    """It would compute every image itself, and nothing would say so."""

    def build_engine(config, clock, make_connector, make_ec_connector, **options):
        make_ec_connector(FINGERPRINT)
        raise AssertionError("the worker would serve")

    monkeypatch.setattr(builder, "build_engine", build_engine)
    context = worker_context("prefill", ec_connector=ECConnectorSection(name="mine"))
    with pytest.raises(ConfigError, match=rf"ec_connector\.name = 'mine': {re.escape(problem)}.*core.ec_connector.ECConnector"):
        builder.assemble(context, lambda facts: None, None, factory)


def test_the_connector_that_a_factory_makes_is_the_workers(monkeypatch):
    made = []

    def build_engine(config, clock, make_connector, *others, **options):
        made.append(make_connector(LAYOUT, FINGERPRINT))
        raise ConfigError("enough")

    connector = P2PConnector(connector_context("prefill"))
    monkeypatch.setattr(builder, "build_engine", build_engine)
    with pytest.raises(ConfigError, match="enough"):
        builder.assemble(worker_context("prefill"), lambda facts: None, lambda context: connector, None)
    assert made == [connector]
