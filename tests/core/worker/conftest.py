"""A worker's state with routers that the test plays."""

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from core.engine.step_watch import StepReading
from core.metrics import WorkerMetrics
from core.wire.messages import Generate, Registered
from core.wire.sampling import SamplingParams
from core.worker.actions import AdmissionLimits, EndUnanswered, EngineLoad, Send, SubmitAbort
from core.worker.role import EngineFacts
from core.worker.state import WorkerState
from decode.role import DecodeHandler
from tests.support.registrations import REGISTRATION

REGISTERED = Registered(router_id="R1", heartbeat_interval_ms=1000, heartbeat_timeout_ms=5000)


class Harness:
    """A worker's state with one or more routers, and what it counted."""

    def __init__(self, num_leased_blocks=0, longest_lease_s=0.0, takes_calls=False, contents=None):
        self.registry = CollectorRegistry()
        self.num_leased_blocks = num_leased_blocks
        self.longest_lease_s = longest_lease_s
        self.progress = StepReading()
        self.state = WorkerState(
            msgspec.structs.replace(REGISTRATION, takes_calls=takes_calls),
            DecodeHandler(EngineFacts(max_model_len=64, eos_token_ids=frozenset({2}))),
            AdmissionLimits(max_num_seqs=2, max_waiting_requests=1, drain_timeout_s=10.0),
            lambda: EngineLoad(
                num_running=1,
                kv_cache_usage=0.5,
                num_leased_blocks=self.num_leased_blocks,
                longest_lease_s=self.longest_lease_s,
                progress=self.progress,
            ),
            WorkerMetrics(self.registry, {}),
            contents,
        )

    def join(self, *links, now=0.0):
        for number, link in enumerate(links):
            self.state.connect(link, now)
            self.state.on_router_message(link, Registered(router_id=f"R{number}"), now)

    def generate(self, request_id="r", link="a", now=0.0, **fields):
        message = Generate(request_id=request_id, prompt_token_ids=(5, 6), sampling=SamplingParams(max_tokens=4), **fields)
        return self.state.on_router_message(link, message, now)

    def count(self, name, **labels):
        return self.registry.get_sample_value(f"kvferry_{name}", labels) or 0


@pytest.fixture
def worker():
    harness = Harness()
    harness.join("a", "b")
    return harness


def sent(actions, link=None):
    return [action.message for action in actions if isinstance(action, Send) and link in (None, action.link)]


def ended_unanswered(request_id):
    return [SubmitAbort([f"{request_id}/0"]), EndUnanswered((request_id,), "aborted:router_lost")]
