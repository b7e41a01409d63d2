"""The agent's process: a worker whose engine is a vLLM server, from its start to its end."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from pathlib import Path
from typing import Literal

from prometheus_client import CollectorRegistry

from agent.engine import AgentIdentity, VllmEngine, WatchTerms
from agent.kv_events import KVEventReader, RenamedBlocks
from agent.prefill_handler import VllmPrefillHandler
from agent.readings import count_handoffs, readings
from agent.vllm_server import Health, VllmFacts, VllmServer
from core.clock import SystemClock
from core.config import KVFerryConfig
from core.config_checks import check_header_key
from core.config_workers import AgentSection
from core.connector import WorkerContext
from core.descriptors import connections_within, raise_descriptor_limit
from core.errors import ConfigError, EngineDead, RequestError
from core.ids import RandomIds, new_incarnation
from core.kv.content_feed import ContentFeed
from core.log import event
from core.metrics import WorkerMetrics
from core.release import package_version
from core.tracing import open_tracer
from core.wire.contents import ContentPart
from core.wire.kv import KVLayoutInfo
from core.wire.messages import Register
from core.worker.actions import AdmissionLimits, EngineLoad
from core.worker.parts import Announce, EngineEvents, WorkerParts, WorkerSource
from core.worker.process import WorkerProcess
from core.worker.role import EngineFacts, RoleHandler
from decode.role import DecodeHandler

logger = logging.getLogger(__name__)

AgentRole = Literal["prefill", "decode", "aggregated"]

CONNECTOR = "vllm"  # an engine's own; only agents read from agents
START_POLL_S = 0.25
WAITING_LINE_S = 30.0  # between two lines in the log, while the server is not ready
WARM_UP_TOKENS = 64
NO_BOUND = 2**53  # of the blocks that a server may report, if it does not say how many it has


def run(config: KVFerryConfig, role: AgentRole, announce: Announce) -> int:
    """Run an agent until it leaves; returns its exit code, 1 after the server was lost.

    Raises:
        KVFerryError: it cannot start.
    """
    if config.worker.can_switch_role:
        raise ConfigError(
            "worker.can_switch_role = true: the role of a vLLM engine is part of its start; start another engine instead",
            param="worker.can_switch_role",
        )
    ids, clock = RandomIds(), SystemClock()
    tracer = open_tracer(config.tracing, role, config.worker.engine_id, clock)
    context = WorkerContext(
        config=config,
        role=role,
        engine_id=config.worker.engine_id,
        incarnation=new_incarnation(ids),
        clock=clock,
        ids=ids,
        metrics=CollectorRegistry(),
        tracer=tracer,
    )
    try:
        return asyncio.run(WorkerProcess(context, VllmWorker(context)).run(announce))
    finally:
        if tracer is not None:
            tracer.close()


class VllmWorker(WorkerSource):
    """The server of the settings."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._server: VllmServer | None = None
        self._facts: VllmFacts | None = None
        self._kv_events: KVEventReader | None = None

    async def load(self) -> None:
        """Wait until the server is ready, then ask what it serves.

        Raises:
            ConfigError: it refuses what the agent needs.
            EngineDead: it is not ready in time.
        """
        section, clock = self._context.config.agent, self._context.clock
        server = self._server = VllmServer(section.engine, read_api_key(section))
        end = clock.now() + section.start_timeout_s
        await self._wait_until_healthy(server, end)
        self._facts = await server.facts()
        if not self._facts.num_blocks:
            reason = "its /metrics do not tell; start vllm serve without --disable-log-stats"
            logger.warning(event("vllm_cache_size_unknown", url=section.engine, reason=reason))
        if not self._facts.has_stats:
            reason = "a long prompt may seem a stall, blocks held for readers are not seen: leave out --disable-log-stats"
            logger.warning(event("vllm_stats_off", url=section.engine, reason=reason))
        await self._warm_up(server, self._facts, end - clock.now())
        self._warn_of_other_name(self._facts)
        logger.info(event("vllm_ready", url=section.engine, version=self._facts.version, model=self._facts.model))

    async def _wait_until_healthy(self, server: VllmServer, end: float) -> None:
        """Look at the server until it is ready, and say now and again what it waits for."""
        section, clock = self._context.config.agent, self._context.clock
        next_line = clock.now()
        while (health := await server.health(START_POLL_S * 8)) is not Health.HEALTHY:
            now = clock.now()
            if now > end:
                raise EngineDead(f"agent.engine = {section.engine}: not ready after {section.start_timeout_s:g} s")
            if now >= next_line:
                logger.info(event("waiting_for_engine", url=section.engine, health=health.value))
                next_line = now + WAITING_LINE_S
            await asyncio.sleep(START_POLL_S)

    async def open(self, events: EngineEvents) -> WorkerParts:
        """See ``WorkerSource``."""
        context, facts, server = self._context, self._facts, self._server
        assert facts is not None, "it is loaded first"
        assert server is not None, "it is loaded first"
        config = context.config
        identity = _identity(context, facts)
        watch = config.agent
        terms = WatchTerms(interval_s=watch.watch_interval_s, patience_s=watch.patience_s, started_at=facts.started_at)
        num_choices = _num_choices(config)
        max_num_seqs = min(config.scheduler.max_num_seqs, num_choices)
        limits = AdmissionLimits(
            max_num_seqs=max_num_seqs,
            max_waiting_requests=num_choices - max_num_seqs,
            drain_timeout_s=config.worker.drain_timeout_s,
        )
        contents = self._follow_cache(identity)
        engine = VllmEngine(server, identity, events, terms, context.clock, context.ids)
        count_handoffs(context.metrics, engine)
        return WorkerParts(
            engine=engine,
            handler=_handler(context.role, facts),
            register=lambda ops_address: _registration(context, identity, facts, limits, ops_address),
            limits=limits,
            load=lambda: _load(engine, identity.lease_s),
            metrics=WorkerMetrics(context.metrics, readings(engine, facts.num_blocks, events.state, context.role)),
            api=engine,
            contents=contents,
        )

    def _follow_cache(self, identity: AgentIdentity) -> ContentFeed | None:
        """Begin to read the server's KV events; None if the settings name none."""
        section = self._context.config.agent
        if not section.kv_events_address:
            return None
        contents = ContentFeed(identity.engine_id, identity.incarnation)
        blocks = RenamedBlocks(identity.model_fingerprint, contents)
        self._kv_events = KVEventReader(section.kv_events_address, section.kv_events_replay_address, blocks)
        self._kv_events.start()
        return contents

    def _warn_of_other_name(self, facts: VllmFacts) -> None:
        """Say so if the server's model has other names than the agent's: it may be another than the router tokenizes for."""
        model = self._context.config.model
        names = {model.name, model.served_name or model.name}
        if not names & {facts.model, facts.root}:
            logger.warning(event("other_model_name", server=facts.model, root=facts.root, agent=", ".join(sorted(names))))

    async def _warm_up(self, server: VllmServer, facts: VllmFacts, timeout_s: float) -> None:
        """Let the server make its first steps before it has requests: routers would take their time for a stall."""
        try:
            async with asyncio.timeout(max(1.0, timeout_s)):
                num_prompt_tokens = max(1, min(WARM_UP_TOKENS, facts.max_model_len - 2))
                await server.compute(num_prompt_tokens=num_prompt_tokens, num_tokens=2)
        except TimeoutError:
            raise EngineDead(f"agent.engine = {server.url}: no answer to a first small request") from None
        except RequestError as error:  # it serves other requests than ours
            logger.warning(event("not_warmed_up", error=str(error)))

    async def close(self) -> None:
        """Close the connections to the server."""
        if self._kv_events is not None:
            await self._kv_events.close()
        if self._server is not None:
            await self._server.close()


def read_api_key(section: AgentSection) -> str:
    """Return the server's API key, empty without one.

    Raises:
        ConfigError: its file cannot be read, or no header can hold it.
    """
    if not section.api_key_file:
        return check_header_key("$VLLM_API_KEY", os.environ.get("VLLM_API_KEY", ""))
    source = f"agent.api_key_file = {section.api_key_file}"
    try:
        key = Path(section.api_key_file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source}: {error}", param="agent.api_key_file") from None
    return check_header_key(source, key)


def _handler(role: str, facts: VllmFacts) -> RoleHandler:
    engine = EngineFacts(max_model_len=facts.max_model_len, eos_token_ids=frozenset())  # the server knows the ends of texts
    return VllmPrefillHandler(engine) if role == "prefill" else DecodeHandler(engine, loads_once=facts.has_prefix_cache)


def _identity(context: WorkerContext, facts: VllmFacts) -> AgentIdentity:
    """Return the identity of the server's KV, as far as it can be known: the engines compare the rest at each handoff.

    The layout holds the version, so that a router pairs no two versions, and says so with both.
    """
    model = context.config.model.served_name or context.config.model.name
    minor = ".".join(facts.version.split(".")[:2])
    return AgentIdentity(
        engine_id=context.engine_id,
        incarnation=context.incarnation,
        model_fingerprint=hashlib.blake2b(f"vllm:{model}".encode(), digest_size=16).digest(),
        layout=KVLayoutInfo(
            dtype=f"vllm {minor}", order="vllm", block_size=16, num_layers=1, num_kv_heads=1, head_dim=1, block_bytes=1
        ),
        lease_s=context.config.connector.lease_s,
    )


def _num_choices(config: KVFerryConfig) -> int:
    """Return how many choices the agent takes, each with a connection to the server; raise the limit of open files for them."""
    wanted = config.scheduler.max_num_seqs + config.worker.max_waiting_requests
    raise_descriptor_limit(wanted)
    return connections_within(wanted, "worker.max_waiting_requests")


def _registration(
    context: WorkerContext, identity: AgentIdentity, facts: VllmFacts, limits: AdmissionLimits, ops_address: str
) -> Register:
    config = context.config
    # A server of which no more is known has room for one request of the greatest length, or it would not have started.
    num_tokens = facts.num_blocks * facts.block_size or facts.max_model_len
    return Register(
        engine_id=context.engine_id,
        incarnation=context.incarnation,
        role=context.role,
        model=config.model.served_name or config.model.name,
        model_fingerprint=identity.model_fingerprint,
        layout=identity.layout,
        max_model_len=facts.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        num_blocks=max(1, num_tokens // identity.layout.block_size),
        content_parts=() if facts.num_blocks else (ContentPart(num_blocks=NO_BOUND),),
        max_num_choices=limits.max_num_seqs + limits.max_waiting_requests,
        connector=CONNECTOR,
        ops_address=ops_address,
        pid=os.getpid(),
        version=f"{package_version()}, vLLM {facts.version}",
        is_supervised=config.worker.is_supervised,
        leaves_first_token=context.role == "prefill",
        takes_calls=True,
        splits_output=facts.splits_output,
    )


def _load(engine: VllmEngine, lease_s: float) -> EngineLoad:
    load = engine.load
    num_leased = load.num_held_blocks or int(engine.may_hold_blocks)
    return EngineLoad(
        num_running=max(load.num_running, engine.num_requests - load.num_waiting),
        num_waiting=load.num_waiting,
        kv_cache_usage=load.kv_cache_usage,
        num_leased_blocks=num_leased,
        longest_lease_s=lease_s if num_leased else 0.0,
        progress=engine.reading(),
    )
