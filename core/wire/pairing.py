"""Whether a worker can read KV blocks from another's pool, and by which transport. Pure functions.

One decision for three places: the producer at a consumer's handshake, the consumer at the answer or at a handoff, and the
router before it pairs two workers, so that it never pairs two whose handshake would be refused.
"""

from __future__ import annotations

import math
from typing import Protocol

from core.constants import DIGEST_TRANSPORTS, HASH_BLOCK_SIZE
from core.errors import ConnectorUnavailable, LayoutMismatch
from core.wire.kv import KVLayoutInfo, KVVerify

SAME_HOST_TRANSPORTS = frozenset({"shm"})
STAGING_BYTES = 64 << 20  # the memory in which a reader converts blocks

SHOWN_HEX_CHARS = 12  # of a model fingerprint, as in ``system_fingerprint``

_SHAPE = ("block_size", "num_kv_heads", "num_planes")  # of a block: a reader can convert these


class KVHolder(Protocol):
    """A worker with a KV pool: its name, model and layout."""

    @property
    def engine_id(self) -> str:
        """Stable name of the instance."""
        ...

    @property
    def model_fingerprint(self) -> bytes:
        """The model whose KV it holds."""
        ...

    @property
    def layout(self) -> KVLayoutInfo:
        """The layout of its blocks."""
        ...


class KVPeer(KVHolder, Protocol):
    """Further facts that both sides of a handoff publish."""

    @property
    def transports(self) -> tuple[str, ...]:
        """Transports that work there; a reader's are in its order of preference."""
        ...

    @property
    def host_id(self) -> str:
        """Equal on two workers that share memory and a pid namespace."""
        ...


class KVReader(KVPeer, Protocol):
    """A worker that loads blocks (``Handshake`` and ``Register`` have these fields)."""

    @property
    def kv_verify(self) -> KVVerify:
        """What it verifies of its reads."""
        ...


class KVOwner(KVPeer, Protocol):
    """A worker whose blocks are read (``HandshakeResponder`` and ``Register`` have these fields)."""

    @property
    def has_digests(self) -> bool:
        """True if its seals hold digests."""
        ...


def choose_transport(reader: KVReader, owner: KVOwner) -> str:
    """Return the reader's first preference that works between the two and that it can verify.

    Raises:
        LayoutMismatch: they hold KV of different models, or in different layouts; the message holds both values.
        ConnectorUnavailable: there is no such transport; the message gives the obstacle of the first one that works
            otherwise.
    """
    check_compatible(owner, reader.model_fingerprint, reader.layout)
    same_host = reader.host_id == owner.host_id
    common = [
        name for name in reader.transports if name in owner.transports and (same_host or name not in SAME_HOST_TRANSPORTS)
    ]
    for name in common:
        if owner.has_digests or not verifies_digests(reader.kv_verify, name):
            return name
    if common:
        check_verifiable(reader.kv_verify, common[0], owner.has_digests)
    hosts = "the same host" if same_host else "different hosts"
    raise ConnectorUnavailable(
        f"no common transport: the reader has {list(reader.transports)}, the owner {list(owner.transports)}, on {hosts}"
    )


def check_compatible(ours: KVHolder, model_fingerprint: bytes, layout: KVLayoutInfo, *, converts_blocks: bool = True) -> None:
    """Check that the peer holds KV of the same model, in the same layout or in one that a reader can convert.

    ``converts_blocks`` is False for readers that cannot convert blocks.

    Raises:
        LayoutMismatch: it does not; the message holds both values.
    """
    if model_fingerprint != ours.model_fingerprint:
        raise LayoutMismatch(
            f"model fingerprint {_shown(model_fingerprint)} at the peer, {_shown(ours.model_fingerprint)} at {ours.engine_id}: "
            "the weights, config.json or model.quantization differ"
        )
    check_convertible(ours.layout, layout, ours.engine_id, converts_blocks=converts_blocks)


def check_convertible(ours: KVLayoutInfo, theirs: KVLayoutInfo, our_name: str, *, converts_blocks: bool = True) -> None:
    """Check that a peer's blocks are like ours, or can be converted.

    Raises:
        LayoutMismatch: they cannot; the message holds both values.
    """
    can_convert = converts_blocks and holds_tokens_alike(theirs, ours)
    converted = {*_SHAPE, "block_bytes"} if can_convert else frozenset()
    differences = [
        f"{field} {getattr(theirs, field)} at the peer, {getattr(ours, field)} at {our_name}"
        for field in KVLayoutInfo.__struct_fields__
        if field not in converted and getattr(theirs, field) != getattr(ours, field)
    ]
    if differences:
        raise LayoutMismatch("KV layouts differ: " + "; ".join(differences))
    if not has_equal_blocks(ours, theirs):
        _check_fits_staging(ours, theirs, our_name)
        _check_lands_in_staging(ours, theirs, our_name)


def has_equal_blocks(ours: KVLayoutInfo, theirs: KVLayoutInfo) -> bool:
    """Return True if the peer's blocks can be read into ours as they are. ``theirs`` has passed ``check_convertible``."""
    return all(getattr(ours, field) == getattr(theirs, field) for field in _SHAPE)


def _shown(model_fingerprint: bytes) -> str:
    """Return enough to tell two models apart, and no more: a refused peer must not learn what would be accepted."""
    return model_fingerprint.hex()[:SHOWN_HEX_CHARS]


def holds_tokens_alike(layout: KVLayoutInfo, other: KVLayoutInfo) -> bool:
    """Return True if a token of a KV head takes the same bytes in both, and a reader can find these as far as they differ."""
    if layout.order != other.order:
        return False
    if layout.num_kv_heads != other.num_kv_heads and not layout.shares_heads:
        return False
    if layout.block_size != other.block_size:
        if not layout.splits_tokens:
            return False
        if layout.block_size % HASH_BLOCK_SIZE or other.block_size % HASH_BLOCK_SIZE:
            return False  # otherwise the ends of blocks are not values of the hash chain
    ours, theirs = (each.block_size * each.num_kv_heads for each in (layout, other))
    return layout.block_bytes * theirs == other.block_bytes * ours


def _check_fits_staging(ours: KVLayoutInfo, theirs: KVLayoutInfo, our_name: str) -> None:
    """Check that a reader has room for the fewest blocks that begin and end together on both sides; it converts them at once.

    Raises:
        LayoutMismatch: it has no such room.
    """
    num_tokens = math.lcm(theirs.block_size, ours.block_size)
    num_bytes = num_tokens // theirs.block_size * theirs.block_bytes
    if num_bytes > STAGING_BYTES:
        raise LayoutMismatch(
            f"block_size {theirs.block_size} at the peer and {ours.block_size} at {our_name} meet every "
            f"{num_tokens} tokens, which are {num_bytes} bytes; at most {STAGING_BYTES} can be converted at once"
        )


def _check_lands_in_staging(ours: KVLayoutInfo, theirs: KVLayoutInfo, our_name: str) -> None:
    """Check that transports can tell the peer's rows from ours: rows of one size land in the pool, others in the staging area.

    Raises:
        LayoutMismatch: they cannot.
    """
    row_bytes = theirs.block_bytes // theirs.num_planes
    if row_bytes == ours.block_bytes // ours.num_planes:
        shapes = [", ".join(f"{field} {getattr(each, field)}" for field in _SHAPE) for each in (theirs, ours)]
        raise LayoutMismatch(
            f"{shapes[0]} at the peer and {shapes[1]} at {our_name} give rows of the same {row_bytes} bytes with other contents"
        )


def verifies_digests(kv_verify: KVVerify, transport: str) -> bool:
    """Return True if a reader checks the bytes read by this transport, and not only the seals."""
    return kv_verify == "digest" or (kv_verify == "auto" and transport in DIGEST_TRANSPORTS)


def check_verifiable(kv_verify: KVVerify, transport: str, has_digests: bool) -> None:
    """Check that the owner's seals have what the reader verifies.

    Raises:
        ConnectorUnavailable: they do not; the message holds both values.
    """
    if verifies_digests(kv_verify, transport) and not has_digests:
        raise ConnectorUnavailable(
            f"the reader verifies digests (kv_verify = {kv_verify} over {transport}), the owner's seals have none "
            "(it makes them with kv_verify = digest, or with auto if it serves tcp from host memory)"
        )
