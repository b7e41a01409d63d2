"""Plans of short runs in which faults strike at the boundaries of chunks, while decode workers read what is sealed.

Few workers and few prompts of three to ten chunks, always with ``connector.early_pull``. A fault is bound to a boundary, not to
a time: it strikes when the prefill worker announces that chunk, or a moment later. A run costs a quarter of a mixed one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from core.config import KVFerryConfig
from core.config_router import RouterSection
from core.config_workers import CacheSection, ConnectorSection, SchedulerSection, WorkerSection
from core.engine.kv_sizing import max_in_flight_tokens
from core.testing.hash_model import FULL, HashAttention, expected_tokens, hash_model_kv_config
from core.wire.messages import Role
from core.wire.pairing import verifies_digests
from kvferry.sim.draw_plan import FIRST_REQUEST_S, HYBRIDS, TRANSPORTS
from kvferry.sim.faults import ChunkFault, Fault, FaultSchedule
from kvferry.sim.network import NetworkWeather
from kvferry.sim.plan import ClusterPlan, RequestPlan, WorkerPlan, router_address
from kvferry.sim.transport import ReadWeather

_CHUNK_TOKENS = 16
_MOST_CHUNKS = 10
_MOST_PROMPT_TOKENS = _MOST_CHUNKS * _CHUNK_TOKENS + _CHUNK_TOKENS - 1
_MAX_MODEL_LEN = 256
_RUNNING_TOKENS = 30  # of the output of a request that is decoded while others are read early
_PLAIN_SHARE, _ASYNC_SHARE, _TIGHT_SHARE, _RUNNING_SHARE = 0.6, 0.2, 0.5, 0.6
_WORKERS = ((1, 1), (1, 1), (2, 1), (1, 2), (2, 2))  # prefill and decode
_DELAYS_S = (0.0, 0.0, 0.0005, 0.002, 0.01, 0.05)  # from a boundary to its fault
_SHORT_S, _LONG_S = (0.05, 0.3, 1.0), (0.3, 1.0, 4.5)  # of faults that last; some are longer than the router's patience
_ON_PREFILL = (Fault.CRASH, Fault.FREEZE, Fault.HANG, Fault.TWIN, Fault.DRAIN, Fault.EARLY_TERM, Fault.SQUEEZE, Fault.JUMP)
_BETWEEN = (Fault.CUT, Fault.PARTITION, Fault.ONE_WAY, Fault.DATA_PARTITION)
_ON_DECODE = (Fault.CRASH, Fault.FREEZE, Fault.HANG, Fault.DRAIN, Fault.SQUEEZE, Fault.SQUEEZE, Fault.JUMP)
_WEATHER = (Fault.DELAY, Fault.REPEAT, Fault.DROP, Fault.STALL, Fault.READ_ERROR, Fault.CORRUPT)
_WEATHER_SHARE = 0.4


@dataclass(frozen=True, slots=True)
class _Shape:
    """What the KV of a run looks like, and how full its pools are."""

    attentions: tuple[HashAttention, ...]
    block_sizes: tuple[int, ...]
    is_tight: bool
    num_tokens: int  # of the longest request with its output

    def num_blocks(self, random: Random, block_size: int, scheduler: SchedulerSection) -> int:
        """Return the size of a pool: room for the longest request at least, the null block included."""
        config = hash_model_kv_config(2, block_size, self.attentions)
        needed = config.num_blocks_of_sequence(self.num_tokens, max_in_flight_tokens(scheduler), _MAX_MODEL_LEN) + 1
        return needed + (random.randint(0, 5) if self.is_tight else needed)


def draw_chunk_plan(seed: int) -> ClusterPlan:
    """Return a run with one or two faults at boundaries of chunks; every tenth run has none."""
    random = Random(f"{seed}/chunks")
    config = _draw_config(random)
    attentions = FULL if random.random() < _PLAIN_SHARE else random.choice(HYBRIDS)
    block_sizes = (random.choice((16, 16, 32)),) if random.random() < _PLAIN_SHARE else (16, 32)
    requests = _draw_requests(random, attentions)
    longest = max(len(request.prompt_token_ids) + request.max_tokens for request in requests)
    shape = _Shape(attentions, block_sizes, random.random() < _TIGHT_SHARE, longest)
    workers = _draw_workers(random, shape, config.scheduler)
    faults = FaultSchedule(frozenset())
    _draw_weather(random, config, faults)
    for _ in range(random.choice((1, 1, 1, 2)) if seed % 10 else 0):
        _draw_fault(random, workers, requests, faults, max(config.scheduler.max_num_batched_tokens, *block_sizes))
    longest_s = max([0.0, *(fault.seconds for fault in faults.at_chunks)])
    faults.quiet_at = max([faults.quiet_at, requests[-1].at + 1.5 + longest_s])
    return ClusterPlan(
        seed=seed,
        config=config,
        attentions=attentions,
        routers=("router-0",),
        workers=workers,
        requests=requests,
        faults=faults,
        max_rows_per_read=random.choice((1, 2, 100)),
        keeps_order=random.random() < 0.5,
        is_supervised=random.random() < 0.5,
        max_model_len=_MAX_MODEL_LEN,
    )


def _draw_config(random: Random) -> KVFerryConfig:
    return KVFerryConfig(
        cache=CacheSection(block_size=16, watermark=random.choice((0.0, 0.0, 0.1))),
        scheduler=SchedulerSection(
            max_num_batched_tokens=random.choice((_CHUNK_TOKENS, _CHUNK_TOKENS, 2 * _CHUNK_TOKENS)),
            max_num_seqs=random.choice((2, 4)),
            policy=random.choice(("fcfs", "fcfs", "priority")),
            long_prefill_token_threshold=0,
            async_scheduling="on" if random.random() < _ASYNC_SHARE else "off",
        ),
        worker=WorkerSection(router_addresses=(router_address("router-0"),), drain_timeout_s=3.0),
        connector=ConnectorSection(
            early_pull=True,
            transports=(random.choice(TRANSPORTS),),
            kv_verify=random.choice(("auto", "auto", "identity", "digest")),
            transfer_deadline_s=2.0,
            handshake_timeout_s=1.0,
            lease_s=4.0,
            lease_renew_interval_s=1.0,
            lease_max_s=16.0,
        ),
        router=RouterSection(
            heartbeat_interval_s=0.5, heartbeat_timeout_s=3.0, request_timeout_s=300.0, local_prefill_itl_ms=0.0
        ),
    )


def _draw_workers(random: Random, shape: _Shape, scheduler: SchedulerSection) -> tuple[WorkerPlan, ...]:
    def draw(role: Role, index: int) -> WorkerPlan:
        block_size = random.choice(shape.block_sizes)
        return WorkerPlan(
            engine_id=f"{role}-{index}",
            role=role,
            num_blocks=shape.num_blocks(random, block_size, scheduler),
            block_size=block_size,
            clock_origin=random.uniform(0.0, 1e5),
            clock_rate=random.choice((1.0, 1.0, 0.8, 1.25)),
            step_s=random.choice((0.01, 0.03) if role == "prefill" else (0.005, 0.02)),
        )

    num_prefill, num_decode = random.choice(_WORKERS)
    prefill = [draw("prefill", index) for index in range(num_prefill)]
    return (*prefill, *[draw("decode", index) for index in range(num_decode)])


def _draw_requests(random: Random, attentions: tuple[HashAttention, ...]) -> tuple[RequestPlan, ...]:
    """Return long prompts, which may begin alike, so that decode workers have hits; and sometimes one that runs beside them."""
    document = [random.randrange(50_000) for _ in range(_MOST_PROMPT_TOKENS)]
    interval_s = random.choice((0.0, 0.02, 0.2, 0.8))
    found = []
    if random.random() < _RUNNING_SHARE:
        found.append(_request("running", FIRST_REQUEST_S - 0.1, document[::-1][:20], _RUNNING_TOKENS, attentions))
    for index in range(random.randint(1, 3)):
        num_tokens = random.randint(3, _MOST_CHUNKS) * _CHUNK_TOKENS + random.randint(0, _CHUNK_TOKENS - 1)
        num_shared = min(random.choice((0, 0, 32, 64)), num_tokens - _CHUNK_TOKENS)
        prompt = document[:num_shared] + [random.randrange(50_000) for _ in range(num_tokens - num_shared)]
        request = _request(f"r{index:02d}", FIRST_REQUEST_S + interval_s * index, prompt, random.randint(2, 6), attentions)
        n, cache_salt = random.choice((1, 1, 1, 2)), random.choice(("", "", "", "tenant"))
        found.append(replace(request, n=n, cache_salt=cache_salt, priority=random.randint(0, 2)))
    return tuple(found)


def _request(name: str, at: float, prompt: list[int], max_tokens: int, attentions: tuple[HashAttention, ...]) -> RequestPlan:
    expected = expected_tokens(prompt, max_tokens, attentions=attentions)
    return RequestPlan(name=name, at=at, prompt_token_ids=tuple(prompt), max_tokens=max_tokens, expected=tuple(expected))


def _draw_weather(random: Random, config: KVFerryConfig, faults: FaultSchedule) -> None:
    """Draw how long frames and reads take, and what goes wrong with them by chance."""
    kinds = frozenset(random.sample(_WEATHER, random.randint(1, 2))) if random.random() < _WEATHER_SHARE else frozenset()
    connector = config.connector
    corrupts_data = all(verifies_digests(connector.kv_verify, name) for name in connector.transports)
    network = NetworkWeather(delay_s=random.choice((0.0005, 0.0005, 0.005)))
    reads = ReadWeather(row_s=random.choice((0.0005, 0.002, 0.01)), corrupts_data=corrupts_data)
    if Fault.DELAY in kinds:
        network.spike_rate, network.spike_s = random.uniform(0.02, 0.3), random.choice((0.05, 0.5))
    if Fault.REPEAT in kinds:
        network.repeat_rate = 0.5
    if Fault.DROP in kinds:
        network.drop_rate, reads.drop_rate = random.uniform(0.1, 0.5), random.choice((0.0, 0.1))
    if Fault.STALL in kinds:
        reads.stall_rate, reads.stall_s = random.uniform(0.1, 0.5), random.choice((0.3, 4.0))
    if Fault.READ_ERROR in kinds:
        reads.error_rate, reads.refuse_rate = random.uniform(0.05, 0.4), random.choice((0.0, 0.1))
    if Fault.CORRUPT in kinds:
        reads.corrupt_rate = random.uniform(0.1, 0.6)
    faults.network, faults.reads, faults.kinds = network, reads, kinds


def _draw_fault(
    random: Random,
    workers: tuple[WorkerPlan, ...],
    requests: tuple[RequestPlan, ...],
    faults: FaultSchedule,
    num_tokens: int,
) -> None:
    """Add a fault at one of the boundaries of a prompt, ``num_tokens`` apart; at boundary 0 nothing is announced yet."""
    decode = random.choice([worker.engine_id for worker in workers if worker.role == "decode"])
    request = random.choice([request for request in requests if request.name != "running"])
    kind, target = random.choice(
        (
            *((kind, "") for kind in _ON_PREFILL),
            *((kind, decode) for kind in _ON_DECODE),
            *((kind, decode) for kind in _BETWEEN),
            *((kind, "router-0") for kind in (Fault.PARTITION, Fault.CUT, Fault.ROUTER_CRASH)),
            *((Fault.ABORT, request.name),) * 4,
        )
    )
    number = random.randrange(max(2, -(-len(request.prompt_token_ids) // num_tokens)))
    delay_s, seconds = random.choice(_DELAYS_S), random.choice(random.choice((_SHORT_S, _LONG_S)))
    fault = ChunkFault(request.name, number, delay_s, kind, target, seconds)
    if number:
        faults.at_chunks.append(fault)
        faults.kinds |= {kind}
    elif kind is not Fault.ABORT:
        prefill = random.choice([worker.engine_id for worker in workers if worker.role == "prefill"])
        faults.add(frozenset({kind}), [fault.event(request.at + delay_s, prefill)])
