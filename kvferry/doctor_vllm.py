"""What vLLM servers show of themselves: whether our agent and the plug-in can work with each, and with each other."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from itertools import pairwise

from agent.server_metrics import ServerLoad
from agent.vllm_server import Health, VllmFacts, VllmServer
from agent.worker import read_api_key
from core.config import KVFerryConfig
from core.errors import ConfigError, KVFerryError
from kvferry.finding import Finding

TIMEOUT_S = 5.0


def check_engines(urls: Sequence[str], config: KVFerryConfig) -> Iterator[Finding]:
    """Look at each server, then compare them in pairs."""
    api_key = read_api_key(config.agent)
    found: dict[str, VllmFacts] = {}
    for url in urls:
        yield from _check_engine(url, api_key, found)
    for first, second in pairwise(found):
        yield from _compare(first, found[first], second, found[second])


def _check_engine(url: str, api_key: str, found: dict[str, VllmFacts]) -> Iterator[Finding]:
    subject = f"engine {url}"
    try:
        health, facts, load = asyncio.run(_look(url, api_key))
    except ConfigError as error:
        yield Finding(subject, "failure", error.message, "start vllm serve as docs/vllm-cluster.md says")
        return
    except KVFerryError as error:
        yield Finding(subject, "failure", error.message, "is the address right, and is vllm serve ready? Its log says")
        return
    if facts is None or load is None:
        text = "nothing listens there, or its engine is dead" if health is Health.GONE else "it does not answer"
        yield Finding(subject, "failure", text, "is the address right, and is vllm serve ready? Its log says")
        return
    found[url] = facts
    cache = f"{facts.num_blocks} blocks of {facts.block_size} tokens" if facts.num_blocks else "KV cache of unknown size"
    size = f"{cache}, at most {facts.max_model_len} tokens a request"
    yield Finding(subject, "ok", f"vLLM {facts.version} serves {facts.model} and takes token ids; {size}")
    if not facts.has_stats:
        text = "its /metrics tell neither its load nor whether it has the plug-in"
        yield Finding(subject, "warning", text, "start it without --disable-log-stats")
        return
    yield Finding(
        subject,
        "ok" if facts.has_plugin else "warning",
        "it hands its KV over by KvferryConnector" if facts.has_plugin else "it has no plug-in: it can only serve alone",
        "--kv-transfer-config with kv_connector KvferryConnector, as docs/vllm.md says",
    )
    yield Finding(
        subject,
        "ok" if facts.has_prefix_cache else "warning",
        f"prefix caching is {'on' if facts.has_prefix_cache else 'off: every turn of a conversation is computed again'}",
        "start it with --enable-prefix-caching",
    )
    is_held = bool(load.num_held_blocks) and not load.num_running and not load.num_waiting
    held = f"; {load.num_held_blocks} blocks are held for readers" if load.num_held_blocks else ""
    yield Finding(
        subject,
        "warning" if is_held else "ok",
        f"{load.num_running} requests run, {load.num_waiting} wait; {load.kv_cache_usage:.0%} of the KV cache is used{held}",
        "without requests they are free after a lease (kvferry.lease_s) at the latest; look again",
    )


async def _look(url: str, api_key: str) -> tuple[Health, VllmFacts | None, ServerLoad | None]:
    server = VllmServer(url, api_key)
    try:
        health = await server.health(TIMEOUT_S)
        if health is not Health.HEALTHY:
            return health, None, None
        return health, await server.facts(), await server.load(TIMEOUT_S)
    finally:
        await server.close()


def _compare(first: str, one: VllmFacts, second: str, other: VllmFacts) -> Iterator[Finding]:
    """Yield what two engines of one cluster disagree about; the plug-in compares the rest at their first handoff."""
    subject = f"engines {first} and {second}"
    differences: dict[str, tuple[object, object, str]] = {
        "version": (_minor(one.version), _minor(other.version), "our router does not pair them: use one minor version"),
        "model": (one.model, other.model, "they are not of one cluster: give both the same --served-model-name"),
    }
    if one.has_stats and other.has_stats:
        differences["plug-in"] = one.has_plugin, other.has_plugin, "no handoff between them: start both with it"
    for name, (left, right, fix) in differences.items():
        if left != right:
            yield Finding(subject, "failure", f"{name}: {left} and {right}", fix)
    if one.max_model_len != other.max_model_len:
        text = f"max_model_len: {one.max_model_len} and {other.max_model_len}; requests are bound by the smaller one"
        yield Finding(subject, "warning", text, "start both with the same --max-model-len")
    if all(getattr(one, name) == getattr(other, name) for name in ("model", "has_plugin")):
        yield Finding(subject, "ok", "one model; layout, dtype and hash seed are compared at their first handoff")


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
