"""Messages about the media of a prompt: the position of an item, its identifier, and the source of its embeddings.

An item is one image as the client sent it. Its placeholder tokens form one span of the prompt; among them, each token whose
id is the model's image token takes one embedding, in order. The *identifier* of an item (``core.kv.hashing.hash_media``) names
its embeddings: equal for equal bytes, processed alike for the same model. Part of ``Generate`` and of the messages of encode
workers (``core.wire.messages``). Knows no pixels.
"""

from __future__ import annotations

import msgspec

from core.wire.limits import EmbeddingCount, MediaIdentifier, MediaIndex, Name, Payload, Positive, Unsigned64, WholeMilliseconds


class MMFeature(msgspec.Struct, frozen=True, kw_only=True):
    """One item of a prompt: the tokens [offset, offset + length) are its span.

    ``media_index`` is its place among the raw media of the request; two features may share one. ``num_embeds`` is the number
    of image tokens in the span, and of rows of its embeddings [num_embeds, hidden_size].
    """

    identifier: MediaIdentifier
    offset: MediaIndex
    length: Positive
    num_embeds: EmbeddingCount
    media_index: MediaIndex

    @property
    def end(self) -> int:
        """Return the position after its last token."""
        return self.offset + self.length


class ECSeal(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that a reader checks before it uses embeddings: item, shape and dtype, and the digest of their bytes.

    ``digest`` is that of ``core.digest``, over the rows as they are in memory, padded with zeros to whole words.
    """

    identifier: MediaIdentifier
    num_embeds: EmbeddingCount
    hidden_size: Positive
    dtype: Name  # torch's name: "float32", "bfloat16"
    digest: Unsigned64


class ECSource(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The source of one item's embeddings, from the EC connector of the worker that holds them.

    ``payload`` is for a connector of the same name only: addresses, segments, offsets. ``lease_ms`` is how long the
    holder keeps them for a reader, counted from sending.
    """

    seal: ECSeal
    connector: Name
    engine_id: Name
    incarnation: Unsigned64
    lease_ms: WholeMilliseconds
    payload: Payload = b""
