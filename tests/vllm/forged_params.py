"""``kv_transfer_params`` that a careless or hostile client, or a network in between, might change."""

from __future__ import annotations

import base64
from typing import Any

import msgspec

from connectors.vllm.handoff_params import VALUE_KEY, EngineHandoff, Rank, decode_handoff, encode_handoff
from core.wire.sockets import join_tcp, split_tcp


def opened(params: dict[str, Any]) -> EngineHandoff:
    """Return the handoff in the parameters."""
    handoff = decode_handoff(params)
    assert handoff is not None
    return handoff


def changed(params: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return the parameters with other values in fields of the handoff."""
    return encode_handoff(msgspec.structs.replace(opened(params), **fields), "forged")


def with_blocks_of(params: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return a handoff with its own lease and hashes, and the blocks of another one under that one's generations."""
    return changed(params, groups=opened(other).groups)


def with_block(params: dict[str, Any], position: int, block_id: int, generation: int | None = None) -> dict[str, Any]:
    """Return a handoff that names any block at one position of its first group; without a generation, under its own."""
    value = msgspec.msgpack.decode(base64.b64decode(params[VALUE_KEY]))
    _, ids, generations = value["groups"][0]
    ids[position] = block_id
    generations[position] = generations[position] if generation is None else generation
    return params | {VALUE_KEY: base64.b64encode(msgspec.msgpack.encode(value)).decode()}


def of_version(params: dict[str, Any], version: int) -> dict[str, Any]:
    """Return what a plug-in of another version would have made: its fields have other names."""
    value = msgspec.msgpack.decode(base64.b64decode(params[VALUE_KEY]))
    renamed = {f"{name}_of_{version}": each for name, each in value.items()} | {"version": version}
    return params | {VALUE_KEY: base64.b64encode(msgspec.msgpack.encode(renamed)).decode()}


def control_address(params: dict[str, Any], rank: int) -> tuple[str, int]:
    """Return host and port at which a rank of P is reached."""
    return split_tcp(opened(params).ranks[rank].control_address)


def through(params: dict[str, Any], rank: int, address: tuple[str, int]) -> dict[str, Any]:
    """Return a handoff whose one rank is reached by another address."""
    ranks = list(opened(params).ranks)
    ranks[rank] = Rank(join_tcp(*address), ranks[rank].incarnation)
    return changed(params, ranks=tuple(ranks))
