"""A whole engine without a model: scheduler, manager, HashModel and a connector whose answers a test writes down."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from core.config_workers import SchedulerSection
from core.kv.hashing import BlockHasher
from core.kv.invariants import find_violations
from core.kv.manager import KVCacheManager
from core.request import (
    EngineCoreOutput,
    NewRequest,
    NewRequestData,
    Request,
    RequestStatus,
    SchedulerOutput,
)
from core.sched.encoder_inputs import EncoderInputs
from core.sched.scheduler import Scheduler
from core.testing.clock import FakeClock
from core.testing.hash_encoder import HashEncoder, Image, input_ids_of, lay_out
from core.testing.hash_model import FULL, HashAttention, HashModel, expected_tokens, hash_model_kv_config
from core.testing.scripted_loads import Remote, Script, ScriptedScheduler, ScriptedWorker
from core.wire.kv import KVHandoff, KVLayoutInfo
from core.wire.messages import ErrorInfo, TransferUsage
from core.wire.sampling import SamplingParams
from kvferry.sim.late_hash_model import LateHashModel
from kvferry.sim.manual_images import ManualImages
from tests.support.scripted_embeddings import EmbeddingScript, ScriptedECScheduler, ScriptedECWorker

LOAD_ERROR = ErrorInfo(code="peer_lost", message="the peer went away", http_status=502, retryable=True)


def kv_of(token_ids: list[int]) -> bytes:
    """Return the KV of a sequence, as another worker computes it."""
    model = HashModel(2, len(token_ids))
    model.execute_model(
        SchedulerOutput(
            scheduled_new_reqs=[NewRequestData("r", Request(_plain(token_ids), None).all_token_ids, 0, None, 0, ([1],), 0)],
            num_scheduled_tokens={"r": len(token_ids)},
        )
    )
    return model.read_block(1)


def _plain(token_ids: list[int]) -> NewRequest:
    return NewRequest(request_id="r", prompt_token_ids=token_ids, sampling=SamplingParams())


@dataclass
class WorldConfig:
    num_blocks: int = 65  # the null block included
    block_size: int = 16
    hash_block_size: int = 16
    max_num_batched_tokens: int = 256
    max_num_seqs: int = 16
    policy: str = "fcfs"
    long_prefill_token_threshold: int = 0
    max_model_len: int = 512
    enable_caching: bool = True
    watermark: float = 0.0
    with_connector: bool = False
    vocab_size: int = 50_000
    kv_load_failure_policy: str = "recompute"
    attentions: Sequence[HashAttention] = FULL
    encoder_cache_size: int = 0  # embeddings; 0 = a model without images
    max_embeds_per_step: int = 64
    with_ec_connector: bool = False
    image_budget: int | None = None  # embeddings; None = images are ready as they come
    async_scheduling: bool = False  # the model computes as late as it may


class World:
    """One engine. ``tokens`` and ``ends`` collect what came out, ``last`` is the newest SchedulerOutput."""

    def __init__(self, **config) -> None:
        self.config = config = WorldConfig(**config)
        self.clock = FakeClock()
        self.hasher = BlockHasher(b"test", config.hash_block_size)
        self.script = Script(attentions=config.attentions)
        self.worker = ScriptedWorker(self.script) if config.with_connector else None
        self.ec = EmbeddingScript()
        ec_worker = ScriptedECWorker(self.ec) if config.with_ec_connector else None
        self.images = ManualImages(config.image_budget) if config.image_budget is not None else None
        self.encoder = HashEncoder(ec_worker, self.images.take if self.images is not None else None)
        self.model = (LateHashModel if config.async_scheduling else HashModel)(
            config.num_blocks,
            config.block_size,
            self.worker,
            config.vocab_size,
            incarnation=1,
            attentions=config.attentions,
            encoder=self.encoder,
        )
        self.manager = KVCacheManager(
            hash_model_kv_config(config.num_blocks, config.block_size, config.attentions),
            config.max_model_len,
            config.block_size,
            config.hash_block_size,
            enable_caching=config.enable_caching,
            watermark=config.watermark,
            seals=self.model.seals,
        )
        connector = ScriptedScheduler(self.script) if config.with_connector else None
        section = SchedulerSection(
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            policy=config.policy,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            async_scheduling="on" if config.async_scheduling else "off",
        )
        policy = config.kv_load_failure_policy
        ec_connector = ScriptedECScheduler(self.ec) if config.with_ec_connector else None
        encoder = EncoderInputs(config.encoder_cache_size, config.max_embeds_per_step, ec_connector, self.images)
        self.scheduler = Scheduler(section, self.manager, config.max_model_len, connector, self.clock, policy, encoder=encoder)
        self.last = SchedulerOutput()
        self.in_flight: deque[tuple[SchedulerOutput, Callable]] = deque()
        self.outputs: list[EngineCoreOutput] = []
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}
        self.inputs: dict[str, list[int]] = {}  # of requests with images

    # ---- driving

    def prompt(self, num_tokens: int, seed: int = 0) -> list[int]:
        """Return a prompt; prompts of one seed are prefixes of each other."""
        source = random.Random(seed)
        return [source.randrange(1000) for _ in range(num_tokens)]

    def add(self, request_id: str, prompt: list[int] | int = 20, max_tokens: int = 4, **new) -> Request:
        """Add a request; a number stands for a prompt of its own of that length."""
        token_ids = self.prompt(prompt, seed=hash_of(request_id)) if isinstance(prompt, int) else prompt
        sampling = new.pop("sampling", None) or SamplingParams(max_tokens=max_tokens)
        request = Request(NewRequest(request_id=request_id, prompt_token_ids=token_ids, sampling=sampling, **new), self.hasher)
        self.scheduler.add_request(request)
        return request

    def add_with_images(self, request_id: str, parts: Sequence[int | Image], max_tokens: int = 4, **new) -> Request:
        """Add a request with images, and between them so many tokens of its own."""
        text = iter(self.prompt(400, seed=hash_of(new.pop("text", request_id))))
        laid_out = lay_out([[next(text) for _ in range(part)] if isinstance(part, int) else part for part in parts])
        self.inputs[request_id] = input_ids_of(*laid_out)
        prompt, features, media = laid_out
        return self.add(request_id, prompt, max_tokens, mm_features=features, media=new.pop("media", media), **new)

    def schedule(self) -> SchedulerOutput:
        self.last = self.scheduler.schedule()
        self.check_writes()
        return self.last

    def written_blocks(self) -> set[int]:
        """Return the blocks into which the newest step computes; to be asked before it is processed."""
        size, written = self.config.block_size, set()
        for request_id, num_tokens in self.last.num_scheduled_tokens.items():
            end = self.scheduler.requests[request_id].num_computed_tokens
            for block_ids in self.manager.get_block_ids(request_id):
                written.update(block_ids[(end - num_tokens) // size : -(-end // size)])
        return written

    def check_writes(self) -> None:
        """No step may write into a block whose seal is whole: readers would take what is half written for good."""
        pool = self.manager.block_pool
        for block in (pool.blocks[block_id] for block_id in self.written_blocks()):
            assert not block.is_null
            assert pool.seals.sealed_generation(block.block_id) != block.generation, block

    def finish_step(self) -> list[EngineCoreOutput]:
        """Run what was scheduled and apply it; with async scheduling apply the step before, or all if nothing was scheduled."""
        self.in_flight.append((self.last, self.model.launch_model(self.last)))
        num_kept = 1 if self.scheduler.can_schedule_ahead() and self.last.total_num_scheduled_tokens else 0
        self.outputs = []
        while len(self.in_flight) > num_kept:
            self.outputs += self.finish_oldest()
        return self.outputs

    def drain(self) -> list[EngineCoreOutput]:
        """Apply all that is in flight."""
        return [output for _ in range(len(self.in_flight)) for output in self.finish_oldest()]

    def finish_oldest(self) -> list[EngineCoreOutput]:
        """Apply the oldest step in flight."""
        step, result = self.in_flight.popleft()
        outputs = self.scheduler.update_from_output(step, result())
        for output in outputs:
            assert output.request_id not in self.ends, f"{output.request_id} speaks after its end"
            if output.sealed_prefix is not None:
                continue
            self.check_told(output)
            self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                self.ends[output.request_id] = output.finish_reason
        return outputs

    def check_told(self, output: EngineCoreOutput) -> None:
        """The first output, and no other, reports about the prompt, and its counts make sense."""
        stats, usage = output.prefill_stats, output.transfer_usage
        is_first = output.request_id not in self.tokens
        assert output.error is not None or (stats is not None) is is_first
        if stats is not None:
            counts = (stats.num_local_cached_tokens, stats.num_external_cached_tokens)
            assert min(counts) >= 0
            assert sum(counts) <= stats.num_prompt_tokens
        if usage is not None:
            assert is_first
            num_prompt_tokens = stats.num_prompt_tokens if stats is not None else self.config.max_model_len
            assert 0 <= usage.recomputed_tokens <= num_prompt_tokens
            assert usage.fallback_reason or not usage.recomputed_tokens

    def step(self) -> list[EngineCoreOutput]:
        self.schedule()
        return self.finish_step()

    def run(self, max_steps: int = 500) -> None:
        """Step until no request is unfinished, and prepare an image between any two steps."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished_requests():
                return
            self.step()
            if self.images is not None:
                self.images.work()
        raise AssertionError(f"still unfinished after {max_steps} steps: {list(self.scheduler.requests.values())}")

    def abort(self, *request_ids: str) -> list[str]:
        return self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    # ---- the connector's worker side

    def complete_load(self, request_id: str, usage: TransferUsage | None = None) -> None:
        """Let the KV arrive; reported by the next step."""
        self.worker.write(self.script.loading.pop(request_id), False)
        self.script.report.finished_recving.add(request_id)
        if usage is not None:
            self.script.report.transfer_usage[request_id] = usage

    def fail_load(self, request_id: str, is_terminal: bool = True, error: ErrorInfo = LOAD_ERROR) -> None:
        """Let a load fail; reported by the next step."""
        self.script.report.failed_recving[request_id] = error
        if is_terminal:
            self.end_load(request_id)

    def end_load(self, request_id: str) -> None:
        """Bring garbage, late, and end the load."""
        load = self.script.loading.pop(request_id)
        invalid = set(self.script.report.invalid_block_ids)
        self.worker.write(load, True)
        self.script.report.invalid_block_ids = invalid
        self.script.report.finished_recving.add(request_id)

    def end_load_partly(self, request_id: str, bad=(), late=(), error: ErrorInfo = LOAD_ERROR, group_id: int = 0) -> list[int]:
        """End a load of which a group's blocks at some positions are bad, and of which some may still be written.

        Returns the block ids of the load's table. Reported by the next step.
        """
        load = self.script.loading.pop(request_id)
        self.worker.write(load, False)
        report, table = self.script.report, load.tables[group_id]
        report.invalid_block_ids |= {table[position] for position in bad}
        report.quarantined_block_ids |= {table[position] for position in late}
        report.load_errors[request_id] = error
        report.finished_recving.add(request_id)
        for position in {*bad, *late}:
            self.spoil(table[position])
        return table

    def spoil(self, *block_ids: int) -> None:
        """Let these blocks hold garbage, now."""
        for block_id in block_ids:
            self.model.write_block(block_id, b"x" * self.model.rows.shape[1])

    def let_late_bytes_arrive(self) -> None:
        """Write garbage into every block of the quarantine."""
        self.spoil(*self.scheduler.state.quarantined)

    def end_quarantine(self) -> None:
        """Report that nothing can arrive any more."""
        self.script.report.unquarantined_block_ids |= self.scheduler.state.quarantined

    def complete_send(self, request_id: str) -> None:
        self.script.report.finished_sending.add(request_id)

    # ---- looking

    def status(self, request_id: str) -> RequestStatus:
        return self.scheduler.requests[request_id].status

    @property
    def running_ids(self) -> list[str]:
        return [request.request_id for request in self.scheduler.running]

    @property
    def waiting_ids(self) -> list[str]:
        return [request.request_id for request in self.scheduler.waiting]

    @property
    def holding_ids(self) -> list[str]:
        return [request.request_id for request in self.scheduler.kv_holding_waiting]

    @property
    def num_used_blocks(self) -> int:
        pool = self.manager.block_pool
        return pool.num_usable_blocks - pool.num_free_blocks

    def num_blocks_of(self, request_id: str) -> int:
        return len(self.manager.get_block_ids(request_id)[0])

    def assert_right(self, request: Request, num_tokens: int) -> None:
        """The request has put out these many tokens, and they are the oracle's."""
        prompt = self.inputs.get(request.request_id) or request.all_token_ids[: request.num_prompt_tokens].tolist()
        assert self.tokens[request.request_id] == self.expected(prompt, num_tokens)

    def assert_sound(self) -> None:
        """The KV cache is consistent, quarantined and pinned blocks included."""
        assert find_violations(self.manager, self.held_blocks()) == []

    def held_blocks(self) -> Counter[int]:
        """Count the references that no block table accounts for."""
        state = self.scheduler.state
        return Counter(state.quarantined) + Counter(block.block_id for step in state.inflight_steps for block in step.pinned)

    def expected(self, token_ids: list[int], num_tokens: int) -> list[int]:
        return expected_tokens(token_ids, num_tokens, self.config.vocab_size, self.config.attentions)

    def assert_clean(self) -> None:
        """Nothing is left: no block in use, no request known, nothing to flush after one more step."""
        self.step()
        assert self.num_used_blocks == 0
        assert self.manager.usage == 0.0
        assert not self.scheduler.requests
        assert not self.scheduler.has_requests()
        assert not self.model.request_ids
        assert self.images is None or self.images.num_images == 0


def hash_of(text: str) -> int:
    return sum(ord(char) * 31**position for position, char in enumerate(text)) + 1


@pytest.fixture
def make_world() -> Callable[..., World]:
    return World


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def loading_world() -> World:
    return World(with_connector=True)


@pytest.fixture
def remote() -> Callable[..., Remote]:
    return Remote


@pytest.fixture(name="kv_of")
def kv_of_fixture() -> Callable[[list[int]], bytes]:
    return kv_of


@pytest.fixture
def load_error() -> ErrorInfo:
    return LOAD_ERROR


@pytest.fixture
def some_handoff() -> KVHandoff:
    layout = KVLayoutInfo(
        dtype="float32", order="NHD", block_size=16, num_layers=1, num_kv_heads=1, head_dim=1, block_bytes=128
    )
    return KVHandoff(
        transfer_id="t",
        engine_id="p",
        incarnation=1,
        control_address="tcp://127.0.0.1:1",
        model_fingerprint=b"test",
        layout=layout,
        groups=(),
        num_tokens=20,
        lease_ms=1000,
    )
