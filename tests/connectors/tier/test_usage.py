"""Blocks that a tier has spoiled: from the scheduler, over a worker's messages, to the router's answer to its client."""

from __future__ import annotations

import pytest

from core.testing.hash_model import expected_tokens
from core.wire import codec
from core.wire.kv import KVLayoutInfo
from core.wire.messages import Register, Tokens
from core.wire.sampling import SamplingParams
from core.worker.role import EngineFacts
from decode.role import DecodeHandler
from prefill.role import PrefillHandler
from router.dispatch.core import RouterCore, RouterLimits, Transmit
from router.dispatch.request_state import Deliver, DeliverTokens
from router.dispatch.types import Submission

LAYOUT = KVLayoutInfo(dtype="float32", order="HND", block_size=16, num_layers=1, num_kv_heads=1, head_dim=8, block_bytes=1024)
LIMITS = RouterLimits(heartbeat_interval_s=1.0, heartbeat_timeout_s=5.0, request_timeout_s=60.0, max_requests=9)
PROMPT = tuple(range(100, 200))  # of which 96 tokens are stored


def registration(role):
    return Register(
        engine_id=role,
        incarnation=1,
        role=role,
        model="tiny",
        model_fingerprint=b"w",
        layout=LAYOUT,
        max_model_len=500,
        max_num_seqs=6,
        num_blocks=40,
    )


class Served:
    """A router whose first worker computes with a tier; messages go through the codec. A decode worker is never answered."""

    def __init__(self, engine, *roles):
        self.engine, (self.role, *_) = engine, roles
        facts = EngineFacts(max_model_len=500, eos_token_ids=frozenset())
        self.handler = PrefillHandler(facts) if self.role == "prefill" else DecodeHandler(facts)
        self.router = RouterCore("tiny", "router-1", LIMITS)
        for role in roles:
            self.router.on_message(role.encode(), registration(role), 0.0)
        self.updates = []

    def ask(self, request_id, max_tokens):
        """Return the tokens of the first worker's answer, and the last report about its KV."""
        self.updates = []
        sampling = SamplingParams(max_tokens=max_tokens)
        self.do(self.router.submit(Submission(request_id=request_id, prompt_token_ids=PROMPT, sampling=sampling), 0.0))
        self.engine.drive(self.on_outputs)
        tokens = [token for update in self.updates for choice in update.choices for token in choice.token_ids]
        return tokens, next((update.handoff for update in reversed(self.updates) if update.handoff), None)

    def do(self, actions):
        for action in actions:
            match action:
                case Transmit(peer, message) if peer.decode() == self.role:
                    for new in self.handler.on_generate(codec.decode_router_frame(codec.encode_router_message(message)), 0.0):
                        self.engine.core.add_request(new)
                case Deliver(_, update):
                    self.updates.append(update)
                case DeliverTokens():
                    self.do(action.updates())

    def on_outputs(self, outputs):
        for reply in self.handler.on_outputs(outputs, 0.0).replies:
            frame = codec.encode_tokens([reply]) if isinstance(reply, Tokens) else codec.encode_worker_message(reply)
            self.do(self.router.on_message(self.role.encode(), codec.decode_worker_frame(frame), 0.0))


@pytest.mark.parametrize(
    ("roles", "max_tokens"), [(("aggregated",), 4), (("prefill", "decode"), 4), (("prefill", "decode"), 1)]
)
def test_client_is_told_of_blocks_that_its_tier_has_spoiled(tier_engine, store, roles, max_tokens):
    served = Served(tier_engine(), *roles)
    assert served.ask("first", max_tokens)[1] is None
    served.engine.forget()
    assert served.ask("loaded", max_tokens)[1] is None, "what a tier has kept is no news"
    served.engine.forget()
    for content, _ in store.blocks.values():
        content[0] ^= 4
    tokens, report = served.ask("spoiled", max_tokens)
    assert tokens == expected_tokens(PROMPT, len(tokens), served.engine.model.vocab_size)
    assert (report.cost.recomputed_tokens, report.cost.fallback_reason) == (96, "digest")
    assert report.outcome is None
    served.engine.assert_is_empty()
