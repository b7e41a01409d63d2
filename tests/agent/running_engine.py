"""An engine over a scripted server, and what it has told."""

from agent.engine import AgentIdentity, VllmEngine, WatchTerms
from agent.vllm_server import VllmServer
from core.clock import SystemClock
from core.ids import RandomIds
from core.request import NewRequest
from core.wire.kv import KVLayoutInfo
from core.wire.sampling import SamplingParams
from core.worker.parts import EngineEvents
from tests.support.polling import until

LAYOUT = KVLayoutInfo(dtype="x", order="y", block_size=16, num_layers=1, num_kv_heads=1, head_dim=1, block_bytes=1)


class Running:
    """An engine over a scripted server, and what it has told."""

    def __init__(self, server, patience_s, started_at=0.0, clock=None):
        self.server = server
        self.outputs, self.replies, self.deaths = [], [], []
        self.http = VllmServer(server.url)
        identity = AgentIdentity(engine_id="p0", incarnation=5, model_fingerprint=b"m", layout=LAYOUT, lease_s=20.0)
        events = EngineEvents(self.outputs.extend, self.replies.append, self.deaths.append, lambda: None)
        terms = WatchTerms(interval_s=0.02, patience_s=patience_s, started_at=started_at)
        self.engine = VllmEngine(self.http, identity, events, terms, clock or SystemClock(), RandomIds())

    async def run(self, request, answer):
        """Serve one request; return its outputs."""
        self.outputs.clear()
        self.server.answers.append(answer)
        self.engine.submit_add([request])
        await self.until(lambda: self.outputs and self.outputs[-1].finish_reason)
        return list(self.outputs)

    async def until(self, holds):
        await until(holds)


def new_request(name="r/0", **fields):
    return NewRequest(**{"request_id": name, "prompt_token_ids": (5, 6), "sampling": SamplingParams(max_tokens=4)} | fields)


def tokens(*token_ids, finish_reason=None, **fields):
    return {"choices": [{"index": 0, "token_ids": list(token_ids), "finish_reason": finish_reason} | fields]}
