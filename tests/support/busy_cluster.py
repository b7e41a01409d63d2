"""A router's records filled as by ten busy minutes, for what shows them: members, history, traffic, and timelines.

The router and its records are real; only the events are made up, at times in the past.
"""

from __future__ import annotations

import math
import random

from core.wire.kv import KVLayoutInfo
from core.wire.messages import ChoiceStart, ErrorInfo, Generate, Heartbeat, Register, TransferUsage
from core.wire.sampling import SamplingParams
from router.dispatch.members import WorkerKey
from router.dispatch.observer import RequestObserver
from router.dispatch.request_state import Retried, open_request
from router.dispatch.timing import RoutingReport, first_token_timing, second_token_timing
from router.dispatch.types import Submission
from router.dispatch.worker_gateway import WorkerGateway
from router.metrics import RouterMetrics
from router.records.history import INTERVAL_S, NUM_INTERVALS

LAYOUT = KVLayoutInfo(dtype="float32", order="HND", block_size=64, num_layers=1, num_kv_heads=1, head_dim=4, block_bytes=2048)
TRANSPORTS = ("shm", "nixl", "tcp")
REASONS = ("prefix", "prefix", "prefix", "wait", "load", "load", "availability")


class BusyCluster:
    """Fills the records of one router. ``gateway`` must not lose silent members: its heartbeat timeout is long."""

    def __init__(self, gateway: WorkerGateway, metrics: RouterMetrics, seed: int = 7) -> None:
        self._gateway = gateway
        self._metrics = metrics
        self._random = random.Random(seed)
        self.now = gateway.now
        self.names: dict[str, list[str]] = {}

    @property
    def observer(self) -> RequestObserver:
        return self._gateway.observer

    def register(self, role: str, count: int, name: str = "{role}-{number}", **facts: object) -> None:
        """Add workers with some load."""
        for number in range(count):
            engine_id = name.format(role=role, number=number)
            peer, incarnation = f"{role}{number}{len(self.names)}".encode(), number + 1
            register = Register(
                engine_id=engine_id,
                incarnation=incarnation,
                role=role,  # type: ignore[arg-type]
                model="tiny",
                model_fingerprint=b"weights",
                layout=LAYOUT,
                max_model_len=8192,
                max_num_seqs=64,
                num_blocks=4096,
                connector="p2p",
                transports=TRANSPORTS,
                has_digests=True,
                version="0.1.0",
                **facts,  # type: ignore[arg-type]
            )
            self._gateway.core.on_message(peer, register, self.now)
            share = self._random.uniform(0.25, 0.7)
            self._gateway.core.on_message(peer, self._heartbeat(engine_id, incarnation, share), self.now)
            self.names.setdefault(role, []).append(engine_id)

    def load(self, role: str, number: int, share: float, *, is_draining: bool = False) -> None:
        """Give a worker another use of its KV cache."""
        engine_id = self.names[role][number]
        (member,) = [each for each in self._gateway.core.membership.members if each.key.engine_id == engine_id]
        beat = self._heartbeat(engine_id, member.key.incarnation, share, is_draining=is_draining)
        self._gateway.core.on_message(member.peer, beat, self.now)

    def _heartbeat(self, engine_id: str, incarnation: int, share: float, *, is_draining: bool = False) -> Heartbeat:
        return Heartbeat(
            engine_id=engine_id,
            incarnation=incarnation,
            num_running=round(40 * share),
            num_waiting=max(0, round(30 * (share - 0.7))),
            kv_cache_usage=share,
            num_leased_blocks=round(100 * share),
            is_draining=is_draining,
        )

    def serve_for_ten_minutes(self) -> None:
        """Fill history, traffic and counters."""
        prefills, decodes = self.names.get("prefill", []), self.names.get("decode", [])
        first = self.now - INTERVAL_S * NUM_INTERVALS
        self.observer.history._totals = None
        self.observer.history.tick(first)
        for number in range(1, NUM_INTERVALS + 1):
            at = first + INTERVAL_S * number
            wave = 1.0 + 0.45 * math.sin(number / 13) + (0.9 if 70 < number < 82 else 0.0)
            for _ in range(round(9 * wave)):
                self._serve_one(prefills, decodes, wave, at)
            for _ in range(round(300 * wave)):
                self._metrics.inter_token_s.observe(self._random.lognormvariate(math.log(0.021 * wave**0.5), 0.35))
            self.observer._num_ended_tokens += round(1700 * wave * self._random.uniform(0.9, 1.1))
            if number % 17 == 0:
                self._metrics.count_failed("invalid_request")
            if 74 < number < 79:
                self._metrics.count_failed("no_worker")
            self.observer.history.tick(at)

    def _serve_one(self, prefills: list[str], decodes: list[str], wave: float, at: float) -> None:
        choice = self._random.choice
        num_tokens = self._random.randint(200, 3000)
        self._metrics.count_placement(choice(REASONS))
        self._metrics.count_hit(num_tokens, round(num_tokens * min(0.9, self._random.betavariate(1.6, 2.2))))
        ttft = self._random.lognormvariate(math.log(0.12 * wave), 0.5)
        self._metrics.observe_first_token(ttft)
        self.observer.history.on_first_token(ttft)
        timing = first_token_timing(ttft, 300 * ttft, 620 * ttft)
        self._metrics.observe_first_token_parts(timing)
        self._metrics.observe_success(ttft + 2.0, ["stop"])
        if not prefills or not decodes:
            return
        number = min(len(prefills) - 1, int(self._random.expovariate(3.0 / len(prefills))))
        decode = choice(decodes)
        is_lost = wave > 1.6 and self._random.random() < 0.25
        cost = TransferUsage(
            transport=TRANSPORTS[number % 3],
            transferred_bytes=num_tokens * 12_288,
            transfer_ms=4.0,
            verify_ms=0.8,
            queue_ms=2.0,
            first_step_ms=14.0,
            fallback_reason="peer_lost" if is_lost else "",
        )
        self._metrics.observe_handoff(second_token_timing(0.024, cost), "peer_lost" if is_lost else "loaded")
        self.observer.traffic.on_prompt(prefills[number], at)
        self.observer.traffic.on_handoff(prefills[number], decode, cost, at)

    def add_request(self, request_id: str, client_id: str, *, is_retried: bool = False) -> None:
        """Add an ended request with a timeline."""
        wanted = Submission(request_id=request_id, prompt_token_ids=tuple(range(1800)), sampling=SamplingParams())
        begun = self.now - 4.0
        opened = self.observer.timelines.begin(wanted, client_id, begun)
        request = opened.request = open_request(wanted, begun, 60.0)
        decode = self.names["decode"][0]
        request.attempt.prefill = WorkerKey(self.names["prefill"][-1], 1)
        request.attempt.decode = WorkerKey(decode, 1)
        generate = Generate(request_id=request_id, prompt_token_ids=(), sampling=SamplingParams(), handoff=True)
        timelines = self.observer.timelines
        failed = WorkerKey(self.names["prefill"][0], 1)
        at = begun + 0.001
        if is_retried:
            timelines.note_leg(request_id, generate, failed.engine_id, at)
            at += 0.09
            error = ErrorInfo(code="peer_unreachable", message="gone")
            timelines.note_retry(Retried(request_id, "prefill", error, failed, request.attempt.prefill), at)
            request.retries.kinds.append("prefill")
        timelines.note_leg(request_id, generate, request.attempt.prefill.engine_id, at)
        measured = request.measurements
        measured.first_token_at = at + 0.14
        measured.first_token = first_token_timing(measured.first_token_at - begun, 31.0, 104.0)
        measured.hit_tokens = 1024
        timelines.note_first_token(opened, measured.first_token_at)
        cost = TransferUsage(
            transport="shm",
            transferred_bytes=776 * 12_288,
            transferred_tokens=1800,
            transfer_ms=9.5,
            verify_ms=1.1,
            queue_ms=3.2,
            first_step_ms=16.0,
            verified_blocks=113,
        )
        choices = (ChoiceStart(index=0, output_token_ids=(1,)),)
        decoding = Generate(request_id=request_id, prompt_token_ids=(), sampling=SamplingParams(), choices=choices)
        timelines.note_leg(request_id, decoding, decode, measured.first_token_at)
        measured.second_token, measured.costs[0] = second_token_timing(0.034, cost), (1, cost)
        request.output_token_ids, request.finish_reasons = [list(range(1, 33))], ["stop"]
        request.placed.routing = RoutingReport(
            reason="prefix", candidates=4, predicted_hit_tokens=1088, longest_hit_tokens=1088, predicted_ttft_ms=151.0
        )
        opened.outcome = "loaded"
        timelines.end(request, begun + 0.92)
