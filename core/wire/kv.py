"""Messages of the KV control plane, between a reader of blocks and their owner, and the handoff descriptor.

The owner is a prefill worker, or any worker whose prefix cache others read. Carried by the owner's control socket (ZeroMQ
ROUTER). Block bytes never travel here: they take the transport. Every message is encoded by ``core.wire.codec``, with a version
byte and a size cap.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from core.wire.limits import (
    BlockHashBytes,
    BlockId,
    ChainBytes,
    Count,
    Name,
    Positive,
    Text,
    Unsigned64,
    WholeMilliseconds,
)

MAX_OTHER_SOURCES = 3  # of the beginning of one prompt, beside the best

KVVerify = Literal["auto", "identity", "digest"]  # what a reader checks: seals, or the digests of the bytes too


class GroupBlocks(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The physical blocks of one KV cache group of a handoff, in table order.

    They hold the last tokens: the first block is at position ``first_block`` of the table, and no later token attends to
    earlier ones. ``generations[i]`` is the generation of ``block_ids[i]`` on the owner. ``block_hashes[i]`` (16 bytes) is the
    chain value at the block's end; the reader compares it with its own hashing of its own prompt.
    """

    group_id: Count
    first_block: Count = 0
    block_ids: tuple[BlockId, ...]
    generations: tuple[Unsigned64, ...]
    block_hashes: tuple[BlockHashBytes, ...]

    def __post_init__(self) -> None:
        if not len(self.block_ids) == len(self.generations) == len(self.block_hashes):
            raise ValueError("block_ids, generations and block_hashes differ in length")
        if len(set(self.block_ids)) < len(self.block_ids):
            raise ValueError("block_ids names a block twice: it can hold the tokens of one position only")


HNC, HNC_VEC, OPAQUE = "HNC", "HNC-vec", "opaque"  # orders of the bytes in vLLM's blocks, see ``core.kv.block_form``
_SPLITS_TOKENS = frozenset({"HND", "NHD", HNC, HNC_VEC})


class KVLayoutInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The layout of one block of the pool, in a form that two workers can compare.

    ``block_bytes`` is the size of one block over all layers. It is contiguous, or, with ``num_planes``, consists of as many
    equal runs, one per layer.
    """

    dtype: Name  # "float32" | "bfloat16" | "float16"; vLLM's with the type of its cache before it
    order: Name  # of the bytes in a block: "HND" | "NHD", and vLLM's
    block_size: Positive  # tokens
    num_layers: Positive
    num_kv_heads: Positive
    head_dim: Positive
    block_bytes: Positive
    num_groups: Positive = 1
    num_planes: Positive = 1

    @property
    def splits_layers(self) -> bool:
        """True if the bytes of a layer can be told apart."""
        return not self.order.startswith(OPAQUE)

    @property
    def splits_heads(self) -> bool:
        """True if the bytes of a KV head can be told apart."""
        return self.order.startswith("H")

    @property
    def shares_heads(self) -> bool:
        """True if pools may share out the KV heads of a model: vLLM's ranks do, and their readers know which has which."""
        return self.order.startswith(HNC)

    @property
    def splits_tokens(self) -> bool:
        """True if the bytes of a token can be told apart."""
        return self.order in _SPLITS_TOKENS


class KVHandoff(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The place of a prompt's KV cache on its owner, and the time for which it is kept.

    ``num_tokens`` prompt tokens are covered, the partial last block included. ``transfer_id`` names the handoff and its
    lease. ``lease_ms`` is a duration from the moment the message was made; clocks are never compared across processes. Without
    a lease it is 0: the blocks may be reused at any time (``core.wire.early``).
    ``engine_params`` is the same in the words of an engine that is not ours, and then ``groups`` is empty.
    """

    transfer_id: Name
    engine_id: Name
    incarnation: Unsigned64
    control_address: Text
    model_fingerprint: bytes
    layout: KVLayoutInfo
    groups: tuple[GroupBlocks, ...]
    num_tokens: Count
    lease_ms: WholeMilliseconds
    engine_params: bytes = b""


class KVSource(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker that holds the beginning of a prompt as far as the router knows: a reader may ask it with ``PrefixQuestion``.

    ``patience_ms`` is about how long the reader would take to compute these tokens itself; it waits no longer for them.
    ``others`` hold some of it as well, and are asked in this order if this one has nothing to offer; theirs do not count.
    """

    engine_id: Name
    incarnation: Unsigned64
    control_address: Text
    num_tokens: Positive
    patience_ms: WholeMilliseconds = 0
    others: Annotated[tuple[KVSource, ...], msgspec.Meta(max_length=MAX_OTHER_SOURCES)] = ()


class Handshake(msgspec.Struct, frozen=True, kw_only=True, tag="hs", omit_defaults=True):
    """Reader → owner: my identity, my layout, and my transports in order of preference."""

    engine_id: Name
    incarnation: Unsigned64
    model_fingerprint: bytes
    layout: KVLayoutInfo
    transports: tuple[Name, ...]
    host_id: Name  # equal on two workers that share memory and a pid namespace
    kv_verify: KVVerify = "auto"


class HandshakeReply(msgspec.Struct, frozen=True, kw_only=True, tag="hs_ok", omit_defaults=True):
    """Owner → reader: accepted, with the chosen transport and its metadata.

    ``transport_metadata`` is the transport's own msgpack (address, memory file, agent metadata); only the transport decodes it.
    """

    engine_id: Name
    incarnation: Unsigned64
    model_fingerprint: bytes
    layout: KVLayoutInfo
    transport: Name
    transport_metadata: bytes
    num_blocks: Positive
    has_digests: bool = False  # its seals hold digests


class HandshakeRefused(msgspec.Struct, frozen=True, kw_only=True, tag="hs_no", omit_defaults=True):
    """Owner → reader: refused, with both values in the message."""

    engine_id: Name
    incarnation: Unsigned64
    code: Name
    message: str


class LeaseRenew(msgspec.Struct, frozen=True, kw_only=True, tag="renew", omit_defaults=True):
    """Reader → owner: keep these handoffs alive. ``number`` comes back with the answer."""

    transfer_ids: tuple[Name, ...]
    number: Count = 0


class LeaseState(msgspec.Struct, frozen=True, kw_only=True, tag="lease", omit_defaults=True):
    """Owner → reader: the time left of each lease in ms; 0 = not held (any more). Names its question."""

    incarnation: Unsigned64
    left_ms: dict[str, WholeMilliseconds]
    number: Count = 0


class LeaseRelease(msgspec.Struct, frozen=True, kw_only=True, tag="release", omit_defaults=True):
    """Reader → owner: done with these handoffs. Idempotent; unknown ids are counted, no error."""

    transfer_ids: tuple[Name, ...]
    reason: Text = "loaded"


class PrefixQuestion(msgspec.Struct, frozen=True, kw_only=True, tag="px", omit_defaults=True):
    """Reader → any worker: how much of my prompt do you hold? Keep that for me.

    ``incarnation`` is that of the worker asked, according to the router. ``chain`` is the reader's own hash chain, 16 bytes for
    each hash block, so it matches the reader's prompt only. The reader's blocks have ``block_size`` tokens: the answer covers a
    multiple of that. ``number`` comes back with the answer.
    """

    number: Count
    engine_id: Name  # of the reader
    incarnation: Unsigned64
    model_fingerprint: bytes
    block_size: Positive
    chain: ChainBytes


class PrefixHeld(msgspec.Struct, frozen=True, kw_only=True, tag="px_ok", omit_defaults=True):
    """The worker holds the tokens that ``kv_handoff`` describes, and keeps them under its lease, as those of a handoff."""

    number: Count
    kv_handoff: KVHandoff


class PrefixRefused(msgspec.Struct, frozen=True, kw_only=True, tag="px_no", omit_defaults=True):
    """The worker keeps nothing for this question; ``reason`` is one of ``connectors.p2p.prefixes.messages``."""

    number: Count
    incarnation: Unsigned64
    reason: Name


class ControlError(msgspec.Struct, frozen=True, kw_only=True, tag="err", omit_defaults=True):
    """Answer to a frame that could not be understood; the frame has no other effect.

    ``kind`` is that of the message which it answers (``kind_of``); empty if the frame could not be decoded, or the sender does
    not say. ``number`` is that of the question which it answers; 0 if that has none, or the sender does not say.
    """

    code: Name
    message: str
    kind: Text = ""
    number: Count = 0

    def may_answer(self, kind: type[ControlMessage]) -> bool:
        """True if the message that it answers may be of this type."""
        return self.kind in {"", kind_of(kind)}


ControlMessage = (
    Handshake
    | HandshakeReply
    | HandshakeRefused
    | LeaseRenew
    | LeaseState
    | LeaseRelease
    | PrefixQuestion
    | PrefixHeld
    | PrefixRefused
    | ControlError
)


def kind_of(message: type[ControlMessage]) -> str:
    """Return the name of a message's type on the wire."""
    return str(message.__struct_config__.tag)


def refusal_of(message: ControlMessage | None, code: str, reason: str) -> ControlError:
    """Return the answer that refuses a message; None = it could not be decoded."""
    if message is None:
        return ControlError(code=code, message=reason)
    return ControlError(code=code, message=reason, kind=kind_of(type(message)), number=getattr(message, "number", 0))
