"""Translates EC offers and fetches into the p2p protocol: an encode worker's announcement, and a reader's fetch as a load.

Owns the payload of an ``ECSource`` of connector "p2p", and the translation of both sides' values to those of
``connectors.p2p``, for which chunks are blocks and a fetch is the load of a request. Pure.
"""

from __future__ import annotations

import msgspec

from connectors.ec.chunks import CHUNK_EMBEDS, ChunkLayout, num_chunks, rows_in_chunk
from connectors.ec.jobs import ChunksFreed, Fetch, FetchEnded, FetchingMetadata, PeerSource, Report
from connectors.p2p.actions import HandoffRef, PullRequest, QuarantineEnded, row_units
from connectors.p2p.metadata import P2PConnectorMetadata
from connectors.p2p.transport.interface import PeerId
from connectors.reports import LoadEnded
from core.errors import LayoutMismatch, ProtocolError
from core.kv.seals import ExpectedSeal
from core.struct_types import prepared
from core.wire.limits import BlockId, Name, Positive, Text, Unsigned64
from core.wire.media import ECSource, MMFeature

NAME = "p2p"


@prepared
class HeldEmbeddings(msgspec.Struct, frozen=True, kw_only=True):
    """The place of embeddings on an encode worker: adjacent chunks, all of one generation, kept by a lease."""

    transfer_id: Name
    control_address: Text
    first_chunk: BlockId
    generation: Unsigned64
    chunk_embeds: Positive = CHUNK_EMBEDS


def encode_held(held: HeldEmbeddings) -> bytes:
    """Return the payload of an ``ECSource``."""
    return msgspec.msgpack.encode(held)


def decode_held(payload: bytes) -> HeldEmbeddings:
    """Decode such a payload.

    Raises:
        ProtocolError: it is malformed.
    """
    try:
        return msgspec.msgpack.decode(payload, type=HeldEmbeddings)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, OverflowError) as error:
        raise ProtocolError(f"malformed payload of an EC source: {error}") from None


def locate(layout: ChunkLayout, feature: MMFeature, announced: ECSource | None) -> PeerSource | None:
    """Return where to read the embeddings of a feature, and the expected seals of their chunks; None: not announced.

    Raises:
        ProtocolError, LayoutMismatch: the announced embeddings cannot be read here.
    """
    if announced is None:
        return None
    held = decode_held(announced.payload)
    if held.chunk_embeds != CHUNK_EMBEDS:
        raise LayoutMismatch(f"chunks of {held.chunk_embeds} rows at the peer, of {CHUNK_EMBEDS} here")
    chunks = range(held.first_chunk, held.first_chunk + num_chunks(feature.num_embeds))
    expected = [
        ExpectedSeal(held.generation, 0, block_hash, rows_in_chunk(feature.num_embeds, index))
        for index, block_hash in enumerate(layout.chunk_hashes(feature.identifier, feature.num_embeds))
    ]
    owner = PeerId(held.control_address, announced.incarnation)
    return PeerSource(owner, held.transfer_id, tuple(chunks), tuple(expected))


def as_p2p(metadata: FetchingMetadata) -> P2PConnectorMetadata:
    """Return a step's orders as input of a ``P2PAgent``. A fetch is named by its item: an item has at most one."""
    return P2PConnectorMetadata(
        holds=[_handoff(source) for source in metadata.holds],
        pulls=[_pull(fetch) for fetch in metadata.fetches],
        aborts=[identifier.hex() for identifier in metadata.aborts],
        releases=[_handoff(source) for source in metadata.releases],
    )


def as_report(happened: LoadEnded | QuarantineEnded) -> Report:
    """Return an agent's report as input of the EC scheduler side. Part of an item counts as nothing."""
    if isinstance(happened, QuarantineEnded):
        return ChunksFreed(happened.block_ids)
    return FetchEnded(
        bytes.fromhex(happened.request_id),
        happened.error,
        happened.quarantined_block_ids,
        was_aborted=happened.usage is None,
    )


def _pull(fetch: Fetch) -> PullRequest:
    source = fetch.source
    assert isinstance(source, PeerSource), "a p2p connector locates peers"
    units = row_units(source.chunks, fetch.chunks, source.expected)
    return PullRequest(fetch.identifier.hex(), _handoff(source), units, fetch.num_embeds, fetch.deadline)


def _handoff(source: PeerSource) -> HandoffRef:
    return HandoffRef(source.transfer_id, source.owner)
