"""Messages to a decode worker while its prompt is computed: where its prefill worker is, and which blocks it can read already.

In an early pull the decode worker reads the sealed prefix of a prompt while its prefill worker computes the rest. The messages
pass the router, which knows both workers and the attempt that they serve. A prefix comes in parts: each message names the
blocks since the one before. Nothing depends on these messages: a lost one only means that less is read early.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from core.wire.kv import KVHandoff
from core.wire.limits import MAX_NUM_FEATURES, Count, Milliseconds, Name, Text, TokenId, Unsigned64
from core.wire.media import MMFeature


class MeetProducer(msgspec.Struct, frozen=True, kw_only=True, tag="meet"):
    """Router → decode worker: this prefill worker computes a prompt that is for you.

    A worker that shakes hands now has its peer open when the handoff comes. It may ignore the message, which no router repeats.
    """

    engine_id: Name
    incarnation: Unsigned64
    control_address: Text


class PrefillProgress(msgspec.Struct, frozen=True, kw_only=True, tag="pprog", omit_defaults=True):
    """Prefill worker → router: these blocks of the prompt are computed and sealed.

    ``kv_handoff`` covers the first ``num_tokens`` tokens. Its groups hold the blocks from ``first_token`` on: the end of the
    last report, or 0 if the prompt is computed again. No lease keeps the blocks: they may be reused at any time, which their
    seals show. ``ready_ms`` is the predicted time until the prompt is computed.
    """

    request_id: Name
    kv_handoff: KVHandoff
    first_token: Count = 0
    ready_ms: Milliseconds


class PullEarly(msgspec.Struct, frozen=True, kw_only=True, tag="early", omit_defaults=True):
    """Router → decode worker: the KV of a request that will follow can be read up to here.

    The first message about a request holds its prompt. ``Generate`` with the same id, or an ``Abort``, ends the early pull.
    """

    request_id: Name
    kv_handoff: KVHandoff
    first_token: Count = 0
    ready_ms: Milliseconds
    prompt_token_ids: tuple[TokenId, ...] = ()
    cache_salt: str = ""
    mm_features: Annotated[tuple[MMFeature, ...], msgspec.Meta(max_length=MAX_NUM_FEATURES)] = ()
