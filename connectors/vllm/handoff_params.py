"""A handoff in ``kv_transfer_params``: what P's answer says, and what D believes of it.

Routers pass the dictionary on unchanged. vLLM's standard keys are there for them and for logs; D uses one opaque value only,
``kvferry``: base64 of msgpack. Any client can write it, so its size is bounded before it is decoded, and every field is
checked while it is decoded.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Annotated, Any, TypeGuard

import msgspec

from connectors.p2p.transport.interface import PeerId
from connectors.vllm.identity import ModelIdentity
from core.errors import InvalidRequest
from core.kv.block import NULL_BLOCK_ID
from core.wire.kv import KVLayoutInfo
from core.wire.limits import BlockHashBytes, BlockId, Count, Name, Positive, Text, Unsigned64, WholeMilliseconds
from core.wire.sockets import split_tcp

VALUE_KEY = "kvferry"
MAX_VALUE_CHARS = 1 << 20  # enough for a million tokens in blocks of 16
MAX_RANKS = 64
MAX_SHOWN_CHARS = 80  # of an engine's id that was not checked
_VERSION = 1

TransferId = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]  # names of leases are longer, and must be a ``Name``


class Rank(msgspec.Struct, frozen=True, array_like=True):
    """One worker process of P: where it is reached, and which start of it."""

    control_address: Text
    incarnation: Unsigned64

    @property
    def peer(self) -> PeerId:
        """The rank as a peer of the agent."""
        return PeerId(self.control_address, self.incarnation)


class HeldBlocks(msgspec.Struct, frozen=True, array_like=True):
    """The blocks of one KV cache group, from the one at position ``first_block`` of the table to the last."""

    first_block: Count
    block_ids: tuple[BlockId, ...]
    generations: tuple[Unsigned64, ...]

    def __post_init__(self) -> None:
        if len(self.block_ids) != len(self.generations):
            raise ValueError("block_ids and generations differ in length")
        if len(set(self.block_ids)) < len(self.block_ids) or NULL_BLOCK_ID in self.block_ids:
            raise ValueError("block_ids names a block twice, or the null block")


class EngineHandoff(msgspec.Struct, frozen=True, kw_only=True):
    """The KV cache of a prompt on an engine: the same blocks on every rank.

    ``prompt_hash`` is the chain value at the end of the prompt, so it stands for every block's. ``layout`` is that of a block
    on one rank.
    """

    version: int = _VERSION
    transfer_id: TransferId
    engine_id: Name
    model: ModelIdentity
    layout: KVLayoutInfo
    num_tokens: Positive
    prompt_hash: BlockHashBytes
    groups: Annotated[tuple[HeldBlocks, ...], msgspec.Meta(min_length=1, max_length=64)]
    ranks: Annotated[tuple[Rank, ...], msgspec.Meta(min_length=1, max_length=MAX_RANKS)]
    lease_ms: WholeMilliseconds

    @property
    def peers(self) -> tuple[PeerId, ...]:
        """The ranks as peers of the agent, in order."""
        return tuple(rank.peer for rank in self.ranks)


class _Versioned(msgspec.Struct):
    """What a handoff of any version says first. Other versions may have other fields."""

    version: int


_version_decoder = msgspec.msgpack.Decoder(_Versioned)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(EngineHandoff)


def encode_handoff(handoff: EngineHandoff, request_id: str) -> dict[str, Any]:
    """Return the ``kv_transfer_params`` of P's answer."""
    host, port = split_tcp(handoff.ranks[0].control_address)
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": handoff.engine_id,
        "remote_request_id": request_id,
        "remote_block_ids": [list(group.block_ids) for group in handoff.groups],
        "remote_host": host,
        "remote_port": port,
        "tp_size": len(handoff.ranks),
        VALUE_KEY: base64.b64encode(_encoder.encode(handoff)).decode(),
    }


def decode_handoff(params: Mapping[str, Any]) -> EngineHandoff | None:
    """Return the handoff of a request's ``kv_transfer_params``; None if they are of another connector.

    Raises:
        InvalidRequest: the value is none of ours, or of another version.
    """
    value = params.get(VALUE_KEY)
    if value is None:
        return None
    if not isinstance(value, str) or len(value) > MAX_VALUE_CHARS:
        raise InvalidRequest(f"kv_transfer_params.{VALUE_KEY} is not a text of at most {MAX_VALUE_CHARS} characters")
    try:
        data = base64.b64decode(value, validate=True)
        version = _version_decoder.decode(data).version
        if version == _VERSION:
            return _decoder.decode(data)
    except (binascii.Error, ValueError, msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"kv_transfer_params.{VALUE_KEY} cannot be decoded: {error}") from None
    raise InvalidRequest(
        f"kv_transfer_params.{VALUE_KEY} is of version {version}, this plug-in reads version {_VERSION}: run one version"
    )


def wants_handoff(params: object) -> bool:
    """Return True for the request of a prompt whose KV another engine will load."""
    return isinstance(params, dict) and params.get("do_remote_decode") is True


def brings_handoff(params: object) -> TypeGuard[dict[str, Any]]:
    """Return True for a request whose prompt another engine has computed.

    ``params`` can be anything: a client may write them into ``vllm_xargs``, which vLLM does not check.
    """
    return isinstance(params, dict) and params.get("do_remote_prefill") is True


def engine_of(params: Mapping[str, Any]) -> str:
    """Return the engine that ``kv_transfer_params`` name, for logs; empty if they name none."""
    engine_id = params.get("remote_engine_id")
    return engine_id[:MAX_SHOWN_CHARS] if isinstance(engine_id, str) else ""
