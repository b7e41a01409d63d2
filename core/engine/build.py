"""An engine from a configuration: model, KV pool, attention, connector, scheduler and runner, put together.

Owns the order of construction and the checks that need several parts at once. Imports no connector: the role's worker passes a
factory, which is called when layout and fingerprint are known. Called once per process, before the engine thread starts.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import torch

from core.attention.base import AttentionBackend
from core.attention.select import AttentionProblem, choose_attention
from core.clock import Clock
from core.compiled import missing_libraries
from core.config import KVFerryConfig
from core.config_workers import (
    CPU_STEP_TOKENS,
    CUDA_STEP_TOKENS,
    ConnectorSection,
    ModelSection,
    SchedulerSection,
    WorkerSection,
)
from core.connector import Connector, KVConnectorWorker
from core.constants import DIGEST_TRANSPORTS, HASH_BLOCK_SIZE
from core.ec_connector import ECConnector
from core.engine.core import EngineCore
from core.engine.cuda.cuda_graphs import CudaRecorder, batch_sizes
from core.engine.cuda.device_memory import DeviceMemory, measure, memory_before_steps, pool_bytes
from core.engine.input_batch import InputBatch
from core.engine.kv_events import KVEventPublisher, event_group
from core.engine.kv_pool import KVPool, PoolOptions, allocate_kv_pool
from core.engine.kv_sizing import KVCacheSizing, layer_specs, size_kv_cache
from core.engine.media.encoder_runner import EncoderRunner
from core.engine.media.image_decode_thread import ImageDecodeThread
from core.engine.runner import ModelRunner
from core.engine.step_watch import StepSize
from core.engine.trial_steps import run_largest_step, run_longest_prefills, run_usual_step, run_widest_decode
from core.errors import ConfigError
from core.grammar.child import Setup
from core.grammar.compiler import GrammarCompiler
from core.kv.content_feed import ContentFeed, FeedPart, pool_parts
from core.kv.events import KVEventFollower
from core.kv.grouping import group_layers
from core.kv.hashing import BlockHasher
from core.kv.manager import KVCacheManager
from core.kv.seals import SealTable
from core.kv.spec import KVCacheConfig, KVCacheGroup
from core.log import event
from core.model.arch import ModelArch, model_fingerprint, parse_arch
from core.model.decoder import Decoder, attention_spec
from core.model.dtype_name import check_quantization, resolve_dtype_name
from core.model.hub import ModelFiles, resolve_model
from core.model.image_encoder import ImageEncoder, load_image_encoder
from core.model.loader import load_decoder
from core.model.tokenizer import parse_tokenizer, read_tokenizer
from core.sched.encoder_inputs import EncoderInputs
from core.sched.scheduler import Scheduler
from core.wire.kv import KVLayoutInfo

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltEngine:
    """The engine and the properties that its worker reports to routers and peers."""

    engine: EngineCore
    files: ModelFiles
    arch: ModelArch
    eos_token_ids: frozenset[int]
    model_fingerprint: bytes
    pool: KVPool  # open until the process ends: peers know its memory file by number
    max_model_len: int  # tokens, prompt and output
    known_step: tuple[StepSize, float] | None = None  # a step computed on the CPU before the first request, and its seconds
    image_decode_thread: ImageDecodeThread | None = None  # of a model that sees images; not started
    connector: Connector | None = None  # not started
    ec_connector: ECConnector | None = None  # not started
    grammars: GrammarCompiler | None = None  # wakes nothing yet
    contents: ContentFeed | None = None  # what routers learn of the prefix cache

    @property
    def layout(self) -> KVLayoutInfo:
        """What one block of the pool looks like."""
        return self.pool.layout

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, the null block included."""
        return self.pool.config.num_blocks


def build_engine(
    config: KVFerryConfig,
    clock: Clock,
    connector_factory: Callable[[KVLayoutInfo, bytes], Connector] | None = None,
    ec_connector_factory: Callable[[bytes], ECConnector | None] | None = None,
    *,
    incarnation: int = 0,
    has_readers: bool = False,
) -> BuiltEngine:
    """Load the model and build everything around it; without a factory the engine serves alone.

    ``ec_connector_factory`` is asked, with the model's fingerprint, for what brings embeddings of images; of a model that sees
    none it is not. Its worker side has learnt the form of the embeddings when this returns.

    ``incarnation`` names this life of the worker in the seals of its blocks and in its reports; with ``has_readers``, peers
    that read the blocks, the seals hold digests where the configuration calls for them. The pool is registered with the
    connector; the connector's own ``start`` is the worker's task, and so are ``KVConnectorWorker.set_wakeup``,
    ``GrammarCompiler.set_wakeup`` and ``ImageDecodeThread.start``.

    Raises:
        ConfigError: a setting, a model file or the memory does not fit.
        ConnectorUnavailable: the connector cannot run here.
    """
    model = _load_model(config)
    files, arch = model.files, model.arch
    fingerprint = model_fingerprint(arch, files.weights_id, config.model.quantization)
    pool = _allocate_pool(config, model, incarnation, makes_digests=has_readers and _readers_demand_digests(config.connector))
    with ExitStack() as on_failure:
        on_failure.callback(pool.close)
        connector = connector_factory(pool.layout, fingerprint) if connector_factory else None
        if connector is not None:
            connector.worker.register_kv_caches(pool.region)
        ec_connector = ec_connector_factory(fingerprint) if ec_connector_factory and model.image_encoder else None
        encoder, encoder_inputs = _encoder_parts(config.scheduler, model.image_encoder, ec_connector)
        runner = _runner(config, model, pool, connector.worker if connector else None, encoder)
        scheduler = _scheduler(model, pool, connector, encoder_inputs, clock)
        events = _kv_event_publisher(config, model.sizing.config.groups)
        grammars = GrammarCompiler(_vocabulary(files, arch.vocab_size))
        hasher = BlockHasher(fingerprint, HASH_BLOCK_SIZE)
        contents = _content_feed(config.worker.engine_id, incarnation, model.sizing.config.groups, connector)
        followers: list[KVEventFollower] = [contents] if events is None else [contents, events]
        engine = EngineCore(scheduler, runner, hasher, arch.vocab_size, followers, grammars=grammars)
        on_failure.pop_all()
    _log_ready(files, pool, scheduler.max_model_len)
    return BuiltEngine(
        engine=engine,
        files=files,
        arch=arch,
        eos_token_ids=frozenset(files.eos_token_ids),
        model_fingerprint=fingerprint,
        pool=pool,
        max_model_len=scheduler.max_model_len,
        known_step=model.known_step,
        image_decode_thread=encoder.image_decode_thread if encoder is not None else None,
        connector=connector,
        ec_connector=ec_connector,
        grammars=grammars,
        contents=contents,
    )


def _content_feed(engine_id: str, incarnation: int, groups: Sequence[KVCacheGroup], connector: Connector | None) -> ContentFeed:
    """Return what the worker reports to routers of its pool and of the connector's tiers."""
    tiers = connector.content_parts if connector is not None else ()
    feed = ContentFeed(engine_id, incarnation, [*pool_parts(groups), *map(FeedPart, tiers)])
    if connector is not None:
        connector.follow_contents(feed.publish_tier)
    return feed


def _vocabulary(files: ModelFiles, vocab_size: int) -> Callable[[], Setup]:
    """Return what tells grammars of the model. Reads the tokenizer's file now, and makes the vocabulary of it when called."""
    content = read_tokenizer(files)

    def setup() -> Setup:
        return Setup(parse_tokenizer(files, content).to_str(), vocab_size, tuple(files.eos_token_ids))

    return setup


@dataclass(frozen=True, slots=True, kw_only=True)
class _LoadedModel:
    """A model in memory, and how its KV is kept; ``config`` has the block size that attention demands."""

    files: ModelFiles
    arch: ModelArch
    dtype: torch.dtype
    config: KVFerryConfig
    backend: type[AttentionBackend]
    decoder: Decoder
    image_encoder: ImageEncoder | None
    sizing: KVCacheSizing
    known_step: tuple[StepSize, float] | None


def _load_model(config: KVFerryConfig) -> _LoadedModel:
    missing = missing_libraries()
    if missing:
        logger.warning(event("compiled_libraries_missing", libraries=",".join(missing)))
    files = resolve_model(config.model.name, Path(config.model.cache_dir))
    arch = parse_arch(files.config)
    if files.unknown_eos_token_ids:
        token_ids = ",".join(map(str, files.unknown_eos_token_ids))
        logger.warning(event("eos_left_out", token_ids=token_ids, vocab_size=arch.vocab_size))
    device = device_of(config.model)
    check_quantization(config.model, device.type)
    dtype = dtype_of(config.model, arch, device)
    config = resolve_scheduling(config, device)
    backend, config = _choose_attention(config, arch, dtype, device)
    is_measured = device.type == "cuda" and not config.cache.num_blocks
    sizing = None if is_measured else size_kv_cache(config, arch, dtype.itemsize)  # what does not fit is refused at once
    layers = KVCacheConfig(2, group_layers(layer_specs(arch, config.cache.block_size, dtype.itemsize)))
    quantization = config.model.quantization
    decoder = load_decoder(
        arch, files.weight_files, dtype=dtype, device=device, layer_groups=layers.layer_groups, quantization=quantization
    )
    image_encoder = load_image_encoder(files, dtype, device, quantization)

    def sizing_within(memory: DeviceMemory) -> KVCacheSizing:
        num_bytes = pool_bytes(memory, config.cache.gpu_memory_utilization, has_graphs=config.model.cuda_graphs)
        if image_encoder is not None:
            num_bytes -= image_encoder.layout.num_bytes(config.scheduler.encoder_cache_embeds)
        return size_kv_cache(_with_cache(config, memory_bytes=max(1, num_bytes)), arch, dtype.itemsize)

    def run_largest(longest: int) -> None:
        run_largest_step(decoder, backend, layers, config.scheduler, dtype)
        run_longest_prefills(decoder, backend, layers, config.scheduler, dtype, longest)
        if image_encoder is not None:
            image_encoder.warm_up()

    if sizing is None:
        longest = sizing_within(memory_before_steps(device)).max_model_len  # of what the pool could hold if steps took nothing
        memory = measure(
            device,
            lambda: run_largest(longest),
            lambda: run_widest_decode(decoder, backend, layers, config.scheduler, dtype, longest),
        )
        sizing = sizing_within(memory)
    return _LoadedModel(
        files=files,
        arch=arch,
        dtype=dtype,
        config=config,
        backend=backend,
        decoder=decoder,
        image_encoder=image_encoder,
        sizing=sizing,
        known_step=_time_usual_step(decoder, backend, layers, config.scheduler, dtype) if device.type == "cpu" else None,
    )


def _time_usual_step(
    decoder: Decoder, backend: type[AttentionBackend], layers: KVCacheConfig, section: SchedulerSection, dtype: torch.dtype
) -> tuple[StepSize, float]:
    """Return a small step and how long it takes once the weights are in memory, so that a hang in the first one is noticed."""
    run_usual_step(decoder, backend, layers, section, dtype)
    started = time.monotonic()
    size = run_usual_step(decoder, backend, layers, section, dtype)
    return size, time.monotonic() - started


def _allocate_pool(config: KVFerryConfig, model: _LoadedModel, incarnation: int, *, makes_digests: bool) -> KVPool:
    return allocate_kv_pool(
        model.sizing.config,
        model.dtype,
        model.backend.preferred_layout,
        model.decoder.device,
        PoolOptions(incarnation=incarnation, makes_digests=makes_digests, huge_pages=config.cache.huge_pages),
    )


def _runner(
    config: KVFerryConfig,
    model: _LoadedModel,
    pool: KVPool,
    connector_worker: KVConnectorWorker | None,
    encoder: EncoderRunner | None,
) -> ModelRunner:
    batch = InputBatch(model.sizing.config, config.scheduler.max_num_seqs, model.sizing.max_model_len)
    runner = ModelRunner(model.decoder, model.backend(pool.cache), pool, connector_worker, batch, encoder)
    if model.decoder.device.type == "cuda" and config.model.cuda_graphs:
        sizes = batch_sizes(config.scheduler.max_num_seqs)
        runner.record_graphs(CudaRecorder(model.decoder.device), sizes, model.sizing.max_model_len)
    return runner


def _scheduler(
    model: _LoadedModel, pool: KVPool, connector: Connector | None, encoder_inputs: EncoderInputs | None, clock: Clock
) -> Scheduler:
    return Scheduler(
        model.config.scheduler,
        _kv_cache_manager(model.config, model.sizing, pool.seals),
        model.sizing.max_model_len,
        connector.scheduler if connector else None,
        clock,
        model.config.connector.kv_load_failure_policy,
        encoder=encoder_inputs,
    )


def _encoder_parts(
    section: SchedulerSection, image_encoder: ImageEncoder | None, connector: ECConnector | None
) -> tuple[EncoderRunner | None, EncoderInputs | None]:
    """Return what runs the encoder, and the scheduler's share of it; neither of a model that sees no images."""
    if image_encoder is None:
        return None, None
    worker, scheduler = (None, None) if connector is None else (connector.worker, connector.scheduler)
    max_per_step = max(section.max_num_encoder_embeds, image_encoder.max_embeds)
    runner = EncoderRunner(image_encoder, image_encoder.arch.image_token_id, image_encoder.layout, worker)
    return runner, EncoderInputs(section.encoder_cache_embeds, max_per_step, scheduler, runner.image_decode_thread)


def _readers_demand_digests(section: ConnectorSection) -> bool:
    """Return True if a reader may demand digests, as it always does over some transports."""
    is_automatic = not DIGEST_TRANSPORTS.isdisjoint(section.transports)
    return section.kv_verify == "digest" or (section.kv_verify == "auto" and is_automatic)


def apply_cpu_threads(section: WorkerSection) -> int:
    """Give the calling thread its share of the host's cores; return the number of torch threads.

    These are settings of a thread: call it on the computing thread, before its first computation. Threads of several workers
    on the same cores wait for each other at every barrier and run many times slower, hence the share and the pinning. The I/O
    and transfer threads are not pinned.
    """
    cores = sorted(os.sched_getaffinity(0))
    num_threads = section.cpu_threads or max(1, len(cores) // section.workers_on_host)
    torch.set_num_threads(num_threads)
    if section.pin_cpus and section.workers_on_host > 1:
        start = section.host_slot * num_threads
        os.sched_setaffinity(0, {cores[(start + offset) % len(cores)] for offset in range(num_threads)})
    return num_threads


def device_of(section: ModelSection) -> torch.device:
    """Return the device that a worker computes on.

    Raises:
        ConfigError: it is CUDA, and there is none.
    """
    has_cuda = torch.cuda.is_available()
    if section.device == "cuda" and not has_cuda:
        raise ConfigError("model.device = 'cuda', but torch finds no CUDA device", param="model.device")
    name = section.device if section.device != "auto" else "cuda" if has_cuda else "cpu"
    return torch.device(name)


def dtype_of(section: ModelSection, arch: ModelArch, device: torch.device) -> torch.dtype:
    """Return the element type of weights, keys and values."""
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    return dtypes[resolve_dtype_name(section.dtype, arch.dtype, device.type)]


def resolve_scheduling(config: KVFerryConfig, device: torch.device) -> KVFerryConfig:
    """Decide how large steps are and whether they are scheduled ahead, where the configuration leaves it open.

    On the CPU steps ahead win nothing: host and device are one.
    """
    section, is_cuda = config.scheduler, device.type == "cuda"
    ahead: Literal["auto", "on", "off"] = section.async_scheduling
    if ahead == "auto":
        ahead = "on" if is_cuda else "off"
    num_tokens = section.max_num_batched_tokens or (CUDA_STEP_TOKENS if is_cuda else CPU_STEP_TOKENS)
    section = msgspec.structs.replace(section, async_scheduling=ahead, max_num_batched_tokens=num_tokens)
    return msgspec.structs.replace(config, scheduler=section)


def _choose_attention(
    config: KVFerryConfig, arch: ModelArch, dtype: torch.dtype, device: torch.device
) -> tuple[type[AttentionBackend], KVFerryConfig]:
    """Return the backend, and the configuration with the block size that it demands."""
    specs = tuple(dict.fromkeys(attention_spec(arch, layer) for layer in range(arch.num_layers)))
    groups = group_layers(layer_specs(arch, config.cache.block_size, dtype.itemsize))
    num_layers = KVCacheConfig(2, groups).layers_per_group
    choice = choose_attention(
        AttentionProblem(device, dtype, specs, num_layers, config.cache.block_size), config.model.attention
    )
    return choice.backend, _with_cache(config, block_size=choice.block_size)


def _with_cache(config: KVFerryConfig, **changes: int) -> KVFerryConfig:
    return msgspec.structs.replace(config, cache=msgspec.structs.replace(config.cache, **changes))


def _kv_cache_manager(config: KVFerryConfig, sizing: KVCacheSizing, seals: SealTable) -> KVCacheManager:
    return KVCacheManager(
        sizing.config,
        sizing.max_model_len,
        scheduler_block_size=config.cache.block_size,
        hash_block_size=HASH_BLOCK_SIZE,
        max_in_flight_tokens=sizing.max_in_flight_tokens,
        enable_caching=config.cache.enable_prefix_caching,
        enable_kv_cache_events=config.cache.enable_prefix_caching,
        watermark=config.cache.watermark,
        seals=seals,
    )


def _kv_event_publisher(config: KVFerryConfig, groups: tuple[KVCacheGroup, ...]) -> KVEventPublisher | None:
    """Open the socket of the KV events, if configured. Opened last, so that no failure can leave it open."""
    if not config.cache.kv_events:
        return None
    topic = f"kv@{config.worker.engine_id}@{config.model.served_name or config.model.name}"
    return KVEventPublisher(
        config.worker.kv_events_address,
        topic,
        groups=[event_group(group.spec) for group in groups],
        replay_address=config.worker.kv_events_replay_address,
    )


def _log_ready(files: ModelFiles, pool: KVPool, max_model_len: int) -> None:
    layout = pool.layout
    logger.info(
        event(
            "engine_built",
            model=files.name,
            dtype=layout.dtype,
            device=pool.region.device,
            num_blocks=pool.config.num_blocks,
            block_size=layout.block_size,
            block_bytes=layout.block_bytes,
            max_model_len=max_model_len,
        )
    )
