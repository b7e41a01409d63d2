"""Settings of the processes that hold KV: workers of any role, agents beside vLLM, stores, and how KV moves between them.

Owns their sections: names, defaults and bounds. ``core.config`` says what two settings mean together.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from core.config_types import (
    HugePages,
    NonNegative,
    NumSeqs,
    Port,
    Positive,
    Seconds,
    SecondsOrZero,
    Section,
    Share,
    ShareBelowOne,
    default_cache_dir,
    default_redis_password,
)

MULTI_CONNECTOR = "multi"  # the connector that stands for several
CPU_STEP_TOKENS = 256  # keeps a step, and with it an abort, well under a second
CUDA_STEP_TOKENS = 8192


class ModelSection(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which model, and how it is computed."""

    name: Annotated[str, msgspec.Meta(min_length=1)] = "smollm2-135m"  # alias, folder, GGUF file, or Hugging Face id
    served_name: str = ""  # the name clients use; empty = ``name``
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: bfloat16 on CUDA, and on CPU for such weights
    quantization: Literal["none", "int8"] = "none"  # int8: 8-bit weights and inputs in attention and MLP; on a CPU only
    device: Literal["auto", "cpu", "cuda"] = "auto"
    generation_config: Literal["auto", "none"] = "auto"  # auto: sampling defaults of the model's generation_config.json
    max_model_len: NonNegative = 0  # tokens; 0 = what the model allows, at most what the pool holds
    cache_dir: str = msgspec.field(default_factory=default_cache_dir)
    # auto: the first to pass its probe
    attention: Literal["auto", "paged_cpu", "varlen", "triton", "pages", "gather", "sdpa"] = "auto"
    cuda_graphs: bool = True  # record decode steps on CUDA at the start: 11 graphs for 64 sequences


class CacheSection(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The KV pool of a worker."""

    block_size: Positive = 64  # tokens; a multiple of HASH_BLOCK_SIZE; on CUDA, a multiple of it if the kernel demands that
    memory_bytes: Positive = 1 << 30  # of the pool on CPU
    huge_pages: HugePages = "never"  # for the pool on CPU
    gpu_memory_utilization: Share = 0.9  # of the GPU's memory for this worker: weights, activations, and the pool that is left
    num_blocks: NonNegative = 0  # 0 = from the memory
    enable_prefix_caching: bool = True
    kv_events: bool = False  # publish what becomes a hit and what is evicted, see worker.kv_events_address
    watermark: ShareBelowOne = 0.0  # share of the pool kept free when a waiting request is admitted beside running ones


class SchedulerSection(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Continuous batching."""

    max_num_batched_tokens: NonNegative = 0  # per step; 0 = 256 on a CPU, 8192 on CUDA
    max_num_seqs: NumSeqs = 64
    policy: Literal["fcfs", "priority"] = "fcfs"  # priority: among equals, short prompts before long ones, within limits
    long_prefill_token_threshold: NonNegative = 0  # largest chunk of one prompt while others are live; 0 = off
    async_scheduling: Literal["auto", "on", "off"] = "auto"  # schedule a step while the one before runs; auto: on CUDA only
    encoder_cache_embeds: Positive = 32768  # embeddings of images that a worker keeps, of its model's hidden size each
    max_num_encoder_embeds: Positive = 1024  # computed per step, or the model's largest image if that has more

    @property
    def step_tokens(self) -> int:
        """The most tokens of a step: ``max_num_batched_tokens``, or what a CPU has by default."""
        return self.max_num_batched_tokens or CPU_STEP_TOKENS


class WorkerSection(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One worker process of any role."""

    engine_id: str = ""  # stable name of the instance (pod name); empty = role, host and pid
    router_addresses: tuple[str, ...] = ("tcp://127.0.0.1:5570",)  # every address a name resolves to is connected
    control_address: str = "tcp://127.0.0.1:0"  # where readers come, of a worker that has any; port 0 = any
    data_port: Port = 0  # prefill, encode: where readers read blocks or embeddings by tcp; 0 = any
    advertise_host: str = ""  # host that peers use for control and data; empty = the bound one
    ops_host: str = "127.0.0.1"
    ops_port: Port = 0  # /started /health /ready /metrics /version /drain /role; 0 = any
    cpu_threads: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 0  # torch threads; 0 = cores // workers_on_host, at least 1
    workers_on_host: Positive = 1
    host_slot: NonNegative = 0  # which of the workers on this host this one is; picks its cores
    pin_cpus: bool = True
    kernel_cache_entries: Positive = 64  # oneDNN kernels kept, one per matrix and number of rows; about 0.2 to 1 MB each
    can_switch_role: bool = False  # between prefill, decode and aggregated, by `kvferry role` or the router's planner
    drain_timeout_s: Seconds = 30.0
    max_waiting_requests: Positive = 1024  # more are refused with 429
    kv_events_address: str = "tcp://127.0.0.1:0"  # ZeroMQ PUB of cache.kv_events; port 0 = any, the log says which
    kv_events_replay_address: str = ""  # ZeroMQ ROUTER that repeats the last batches; empty = none
    stuck_step_s: Seconds = 120.0  # bound of the first step of a size, see docs/operations.md; then /health fails
    is_supervised: bool = False  # a supervisor restarts the worker when it ends; `kvferry serve` and the chart set it


class LMCacheSection(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Connector ``lmcache``: the LMCache server of this host, and how long it is waited for."""

    server_address: str = "tcp://127.0.0.1:5555"  # its ZeroMQ port
    http_address: str = "http://127.0.0.1:8080"  # its admin port, asked for version and settings
    staging_bytes: Positive = 256 << 20  # shared memory of a worker through which all blocks go; half to load, half to save
    lookup_timeout_s: Seconds = 1.0  # then the request goes on without
    request_timeout_s: Seconds = 5.0  # a server that is silent for so long is not used until it answers again
    heartbeat_interval_s: Seconds = 2.0
    retry_interval_s: Seconds = 1.0  # between attempts to reach the server
    handoff_wait_s: Seconds = 0.25  # how long a decode worker waits for what the prefill worker is still saving
    save_decode_cache: bool = True  # blocks of generated tokens too


class OffloadSection(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Connector ``offload``: blocks in the host memory of the worker that has computed them."""

    memory_bytes: Positive = 1 << 30
    huge_pages: HugePages = "never"  # as cache.huge_pages
    mode: Literal["eager", "lazy"] = "eager"  # eager: each block once it is complete; lazy: before the pool reuses it
    eviction: Literal["lru", "s3fifo", "arc"] = "arc"


class StoreSection(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Connector ``store``: blocks in the store that section ``kvstore`` describes."""

    save_decode_cache: bool = True  # blocks of generated tokens too


class ConnectorSection(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How KV leaves and enters a worker."""

    name: str = "p2p"  # an installed connector, or module:factory
    connectors: tuple[str, ...] = ()  # of connector "multi", in order: the first that has a prompt's blocks loads them
    transports: tuple[str, ...] = ("shm", "tcp")  # of the p2p connector, in order of preference
    kv_load_failure_policy: Literal["recompute", "fail"] = "recompute"  # what becomes of a request whose KV cannot be loaded
    kv_verify: Literal["auto", "identity", "digest"] = "auto"  # auto: digest over tcp, identity over shm and nixl
    early_pull: bool = False  # a decode worker reads sealed blocks of a prompt while its prefill worker computes the rest
    transfer_deadline_s: Seconds = 30.0
    transfer_stall_s: Seconds = 5.0  # a read that brings no byte for so long is ended if its producer answers messages; tcp
    transport_retry_s: Seconds = 1.0  # a transport that failed to a peer is probed after this, then after twice as long,
    transport_retry_max_s: Seconds = 60.0  # up to this
    handshake_timeout_s: Seconds = 5.0
    lease_s: Seconds = 30.0
    lease_renew_interval_s: Seconds = 5.0
    lease_max_s: Seconds = 600.0
    # blocks that late reads of one peer may hold before it is cut off; 0 = a quarter of the pool; all peers: half, if more
    max_quarantined_blocks: NonNegative = 0
    peer_prefixes: bool = False  # of p2p: load beginnings of prompts from any worker that holds them, and serve them
    lmcache: LMCacheSection = LMCacheSection()
    offload: OffloadSection = OffloadSection()
    store: StoreSection = StoreSection()
    extra: dict[str, Any] = msgspec.field(default_factory=dict)  # for connectors from outside

    @property
    def names(self) -> tuple[str, ...]:
        """The connectors that there are, whether one or several."""
        return self.connectors if self.name == MULTI_CONNECTOR else (self.name,)


class ECConnectorSection(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How embeddings of images leave and enter a worker."""

    name: str = "none"  # an installed EC connector, or module:factory; none: every worker computes its own
    transports: tuple[str, ...] = ("shm", "tcp")  # of "p2p", in order of preference
    memory_bytes: Positive = 256 << 20  # host memory for embeddings that are held for readers, have been fetched, or are stored
    transfer_deadline_s: Seconds = 10.0  # for all embeddings of a request; then they are computed where they are needed
    handshake_timeout_s: Seconds = 5.0
    lease_s: Seconds = 60.0  # how long an encode worker holds embeddings for a reader that does not renew
    kvstore_address: str = ""  # of the store of "shared"; empty = kvstore.address


class KVStoreSection(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A store of KV blocks beyond the workers' pools: a process of its own (``kvferry kvstore``), or a part of each worker."""

    address: str = ""  # of the server that workers use; empty = each worker has a store of its own
    bind_address: str = "tcp://127.0.0.1:5580"  # of the server; port 0 = any
    ops_host: str = "127.0.0.1"
    ops_port: Port = 0  # /health /ready /metrics of the server; 0 = any
    memory_bytes: Positive = 1 << 30  # of the arena
    huge_pages: HugePages = "never"  # for the arena, as cache.huge_pages
    block_bytes: NonNegative = 0  # of the largest block; 0 = that of the first client
    eviction: Literal["lru", "s3fifo", "arc"] = "arc"
    write_policy: Literal["through", "back"] = "through"  # to disk and Redis: at once, or when memory gets full
    max_pinned_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.5  # of the arena, by one client
    disk_path: str = ""  # folder of the disk tier; empty = none
    disk_bytes: Positive = 8 << 30
    disk_segment_bytes: Positive = 64 << 20  # per file
    disk_sync: bool = False  # write through to the device, so that blocks survive a loss of power as well
    redis_url: str = ""  # redis://[user@]host:port/db; empty = no such tier
    redis_password: str = msgspec.field(default_factory=default_redis_password)  # plain text; refused in redis_url
    redis_timeout_s: Seconds = 0.5
    redis_ttl_s: SecondsOrZero = 0.0  # how long Redis keeps a block; 0 = as long as it has room
    request_timeout_s: Seconds = 2.0  # what a client waits for an answer; then it is a miss
    heartbeat_interval_s: Seconds = 0.5
    client_timeout_s: Seconds = 5.0  # a client that is silent for so long loses its pins


class EncodeSection(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One encode worker process: a model's vision tower without the rest."""

    max_batch_images: Positive = 4  # computed in one step; what comes meanwhile waits for the next


class AgentSection(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The agent beside a vLLM server. How many choices it takes is ``scheduler.max_num_seqs``, the rest section ``worker``."""

    engine: str = "http://127.0.0.1:8000"  # of `vllm serve --enable-scale-out`
    api_key_file: str = ""  # holds the server's API key; empty = $VLLM_API_KEY
    start_timeout_s: Seconds = 1800.0  # until the server is ready: it loads its model
    watch_interval_s: Seconds = 1.0  # between two looks at its health and load
    patience_s: Seconds = 10.0  # without an answer to such a look; then the agent ends; at once if the server is gone
    kv_events_address: str = ""  # ZeroMQ PUB of the server's `--kv-events-config`; empty = routers learn nothing of its cache
    kv_events_replay_address: str = ""  # its replay endpoint, for events that were missed; empty = none
