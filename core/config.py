"""Every setting of kvferry, its default, and its range.

A process gets one ``KVFerryConfig``; each part of the code receives only its section. This is the only module that reads
the environment. Files (YAML, TOML or JSON), ``--set a.b=c`` and flags all go through ``load_config``, so a wrong key or
value is refused in one place, with its path and what is allowed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from core.config_checks import check_address, check_both_or_neither, check_order, check_peer_addresses
from core.config_tree import check_keys, explain, kind_of, parse_value, put, read_file, read_sizes
from core.constants import HASH_BLOCK_SIZE
from core.errors import ConfigError

MULTI_CONNECTOR = "multi"  # the connector that stands for several
P2P_TRANSPORTS = ("shm", "nixl", "tcp")  # what connector "p2p" can be told to use
CPU_STEP_TOKENS = 256  # keeps a step, and with it an abort, well under a second
CUDA_STEP_TOKENS = 8192


Positive = Annotated[int, msgspec.Meta(ge=1)]
NonNegative = Annotated[int, msgspec.Meta(ge=0)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=3_600_000)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=365 * 86400)]
ShareBelowOne = Annotated[float, msgspec.Meta(ge=0, lt=1)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
NumSeqs = Annotated[int, msgspec.Meta(ge=1, le=65536)]  # the engine keeps a row for each
HugePages = Literal["never", "auto", "always"]  # auto: ordinary pages where there are not enough, with a warning


def default_cache_dir() -> str:
    """Return the folder for models: ``$KVFERRY_CACHE``, else ``$XDG_CACHE_HOME/kvferry``, else ``~/.cache/kvferry``."""
    explicit = os.environ.get("KVFERRY_CACHE")
    if explicit:
        return explicit
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return str(Path(base) / "kvferry")


def default_package_index() -> str:
    """Return the package index where there is no pip to know it: ``$PIP_INDEX_URL``, else PyPI."""
    return os.environ.get("PIP_INDEX_URL") or "https://pypi.org/simple"


def default_api_key() -> str:
    """Return the clients' key: ``$KVFERRY_API_KEY``, which no list of processes shows; else none."""
    return os.environ.get("KVFERRY_API_KEY", "")


def default_cluster_key() -> str:
    """Return the cluster's secret: ``$KVFERRY_CLUSTER_KEY``, which no list of processes shows; else none."""
    return os.environ.get("KVFERRY_CLUSTER_KEY", "")


def default_other_cluster_keys() -> str:
    """Return ``$KVFERRY_OTHER_CLUSTER_KEYS``, which no list of processes shows; else none."""
    return os.environ.get("KVFERRY_OTHER_CLUSTER_KEYS", "")


def default_redis_password() -> str:
    """Return Redis's password: ``$KVFERRY_REDIS_PASSWORD``, which no list of processes shows; else none."""
    return os.environ.get("KVFERRY_REDIS_PASSWORD", "")


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the configuration sections."""


class ModelSection(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which model, and how it is computed."""

    name: str = "smollm2-135m"  # alias, folder, GGUF file, or Hugging Face id
    served_name: str = ""  # the name clients use; empty = ``name``
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: bfloat16 on CUDA, and on CPU for such weights
    device: Literal["auto", "cpu", "cuda"] = "auto"
    generation_config: Literal["auto", "none"] = "auto"  # auto: sampling defaults of the model's generation_config.json
    max_model_len: NonNegative = 0  # tokens; 0 = what the model allows, at most what the pool holds
    cache_dir: str = msgspec.field(default_factory=default_cache_dir)
    # auto: the first to pass its probe
    attention: Literal["auto", "paged_cpu", "varlen", "triton", "pages", "gather", "sdpa"] = "auto"
    cuda_graphs: bool = True  # record decode steps on CUDA, 100 and more at start


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
    control_address: str = "tcp://127.0.0.1:0"  # prefill, encode: where readers shake hands; port 0 = any
    data_port: Port = 0  # prefill, encode: where readers read blocks or embeddings by tcp; 0 = any
    advertise_host: str = ""  # host that peers use for control and data; empty = the bound one
    ops_host: str = "127.0.0.1"
    ops_port: Port = 0  # /started /health /ready /metrics /drain; 0 = any
    cpu_threads: NonNegative = 0  # torch threads; 0 = cores // workers_on_host, at least 1
    workers_on_host: Positive = 1
    host_slot: NonNegative = 0  # which of the workers on this host this one is; picks its cores
    pin_cpus: bool = True
    kernel_cache_entries: Positive = 64  # oneDNN kernels kept, one per matrix and number of rows; about 0.2 to 1 MB each
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
    lmcache: LMCacheSection = LMCacheSection()
    offload: OffloadSection = OffloadSection()
    store: StoreSection = StoreSection()
    extra: dict[str, Any] = {}  # for connectors from outside

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
    redis_ttl_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0  # how long Redis keeps a block; 0 = as long as it has room
    request_timeout_s: Seconds = 2.0  # what a client waits for an answer; then it is a miss
    heartbeat_interval_s: Seconds = 0.5
    client_timeout_s: Seconds = 5.0  # a client that is silent for so long loses its pins


class ImagesSection(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Images that clients send, for a model that reads them."""

    max_count: Annotated[int, msgspec.Meta(ge=0, le=256)] = 16  # of one request; 0 = none are taken
    max_bytes: Annotated[int, msgspec.Meta(ge=1, le=20 << 20)] = 8 << 20  # of one file
    max_total_bytes: Annotated[int, msgspec.Meta(ge=1, le=40 << 20)] = 32 << 20  # of a request's files; a frame holds the most
    max_pixels: Annotated[int, msgspec.Meta(ge=1, le=64 << 20)] = 12 << 20  # of one image; no worker decodes more than the most
    allowed_hosts: tuple[str, ...] = ()  # of http(s) URLs: name, *.name, either with :port, address or network; none = refused
    fetch_timeout_s: Seconds = 5.0  # per image, with its wait for a turn and its redirects
    max_redirects: NonNegative = 3
    max_fetches: Positive = 32  # of all clients at a time; others wait their turn
    encode_timeout_s: Seconds = 20.0  # after that the prefill worker computes a request's embeddings itself


class RouterSection(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The OpenAI front and the workers' meeting point."""

    host: str = "127.0.0.1"
    port: Port = 8000
    worker_address: str = "tcp://127.0.0.1:5570"  # ZeroMQ ROUTER; port 0 = any
    heartbeat_interval_s: Seconds = 1.0
    heartbeat_timeout_s: Seconds = 5.0
    request_timeout_s: Seconds = 600.0
    max_body_bytes: Positive = 12 << 20  # of one request: an image of images.max_bytes as a data URL, and text
    max_upload_bytes: Positive = 256 << 20  # of all bodies that are held at a time; what exceeds it is refused with 503
    ops_host: str = "127.0.0.1"
    ops_port: Port | None = None  # probes, metrics and status there instead of on `port`, which keeps the probes; 0 = any
    max_connections: Positive = 8192  # of clients; for one more the longest idle one is closed, or else itself
    max_connections_per_address: NonNegative = 1024  # more of one address (IPv6: of one /64) are closed; 0 = no such limit
    proxy_addresses: tuple[str, ...] = ()  # load balancers and their networks, which have no limit per address
    max_head_bytes: Annotated[int, msgspec.Meta(ge=1024, le=1 << 20)] = 64 << 10  # of a request's head; more is a 431
    idle_timeout_s: Seconds = 75.0  # between an answer and the next request of a connection
    receive_timeout_s: Seconds = 60.0  # for a request's head to arrive, and again for its body
    send_timeout_s: Seconds = 60.0  # a client that takes nothing of its answer for so long is cut off
    max_requests: Positive = 4096  # in flight; more are refused with 429
    max_requests_per_key: NonNegative = 0  # open at once with one API key; more are refused with 429; 0 = no such limit
    max_prompt_tokens: NonNegative = 0  # longer prompts are refused with 400; 0 = what the model allows
    text_threads: Annotated[int, msgspec.Meta(ge=1, le=64)] = 2  # tokenize long texts and fill in long conversations
    tool_format: str = "auto"  # of tool calls in a model's output, a name of kvferry.tool_formats; auto: by its chat template
    tools_in_prompt: Literal["template", "hermes"] = "template"  # hermes: in messages, if the template reads no tools
    max_retries: NonNegative = 2  # per request: how many workers may fail it; refusals, pauses and stalls do not count
    drain_timeout_s: Seconds = 30.0  # how long requests in flight may take to end when the router is asked to leave
    # How the worker that computes a prompt is chosen: by the predicted time to the first token, prefixes in its cache counted,
    # or by its number of requests.
    routing: Literal["predicted", "least_loaded"] = "predicted"
    local_prefill_itl_ms: Milliseconds = 0.0  # a decode worker computes a prompt if its steps stay within this; 0 = never
    worker_wait_s: Seconds = 10.0  # how long an accepted request waits for a worker that no supervisor is known to restart
    api_key: str = msgspec.field(default_factory=default_api_key)  # clients send it as a bearer token; several: by commas
    cors_origins: tuple[str, ...] = ()  # of web pages whose scripts may call the API, such as https://chat.example; * = all
    tls_cert: str = ""  # file of the certificate and those up to its root; clients then use https; empty = http
    tls_key: str = ""  # file of its key, without a password
    images: ImagesSection = ImagesSection()


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


class LocalSection(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``kvferry serve``: a whole cluster on this machine."""

    num_prefill: NonNegative = 1
    num_decode: NonNegative = 1
    num_encode: NonNegative = 0  # without any, prefill workers compute the embeddings of images
    aggregated: bool = False
    kvstore: bool = False  # a store of its own for the cluster, which connector "store" uses
    engine: Literal["kvferry", "vllm"] = "kvferry"  # of the workers; vllm: a `vllm serve` for each, and its agent
    vllm_command: str = "vllm"  # of an environment of its own, such as /opt/vllm/bin/vllm; words as in a shell
    vllm_arguments: str = ""  # more arguments of `vllm serve`; words as in a shell
    ready_timeout_s: Seconds = 120.0  # with engine vllm agent.start_timeout_s, if that is longer
    restart_backoff_s: Seconds = 0.5
    restart_backoff_max_s: Seconds = 30.0
    health_interval_s: Seconds = 2.0  # between two checks of a process's /health
    health_timeout_s: Seconds = 5.0  # for one answer
    health_max_failures: Positive = 3  # answers in a row that say "unwell"; then the process is restarted
    health_max_silence_s: Seconds = 20.0  # without an answer; then it is, too


class SecuritySection(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who may be a part of the cluster."""

    cluster_key: str = msgspec.field(default_factory=default_cluster_key)  # the same everywhere; `kvferry keygen` makes one
    # While the cluster key changes, separated by commas: processes that bind with one of these are connected to as well.
    other_cluster_keys: str = msgspec.field(default_factory=default_other_cluster_keys)
    insecure: bool = False  # without a key, bind cluster sockets where other machines reach them; a local cluster makes none


class LogSection(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Log output."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    format: Literal["text", "json"] = "text"  # a line of key=value pairs, or one JSON object


class TracingSection(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Traces of requests for OpenTelemetry (extra ``otel``), whose own variables ``OTEL_EXPORTER_OTLP_*`` hold as well."""

    endpoint: Annotated[str, msgspec.Meta(pattern=r"^(https?://\S+)?$")] = ""  # of a collector's OTLP/HTTP; empty = no traces
    sample_ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0  # of traces that begin here, not of clients'
    service_name: str = "kvferry"
    export_interval_s: Seconds = 5.0  # between two batches of ended spans
    timeout_s: Seconds = 5.0  # for a batch to be sent; after that it is lost


class KVFerryConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All sections."""

    model: ModelSection = ModelSection()
    cache: CacheSection = CacheSection()
    scheduler: SchedulerSection = SchedulerSection()
    worker: WorkerSection = WorkerSection()
    connector: ConnectorSection = ConnectorSection()
    ec_connector: ECConnectorSection = ECConnectorSection()
    kvstore: KVStoreSection = msgspec.field(default_factory=KVStoreSection)  # its defaults are from the
    router: RouterSection = msgspec.field(default_factory=RouterSection)  # environment, as these are
    encode: EncodeSection = EncodeSection()
    agent: AgentSection = AgentSection()
    local: LocalSection = LocalSection()
    security: SecuritySection = SecuritySection()
    log: LogSection = LogSection()
    tracing: TracingSection = TracingSection()

    def __post_init__(self) -> None:
        """Check what two settings mean together."""
        if self.cache.block_size % HASH_BLOCK_SIZE:
            raise ConfigError(
                f"cache.block_size = {self.cache.block_size} is not a multiple of the hash block size {HASH_BLOCK_SIZE}",
                param="cache.block_size",
            )
        if self.cache.kv_events and not self.cache.enable_prefix_caching:
            raise ConfigError(
                "cache.kv_events = true: there are no events without cache.enable_prefix_caching", param="cache.kv_events"
            )
        connector, router, worker = self.connector, self.router, self.worker
        check_order("connector", connector, "lease_renew_interval_s < lease_s", "lease_s <= lease_max_s")
        check_order("connector", connector, "transport_retry_s <= transport_retry_max_s")
        check_order("router", router, "heartbeat_interval_s < heartbeat_timeout_s", "max_body_bytes <= max_upload_bytes")
        _check_connectors(connector)
        _check_transports("connector.transports", connector.transports, is_p2p="p2p" in connector.names)
        _check_ec_connector(self)
        _check_lmcache(connector.lmcache)
        if self.scheduler.async_scheduling == "on" and "lmcache" in connector.names:
            raise ConfigError(
                "scheduler.async_scheduling = on: connector lmcache judges each step before it schedules the next one",
                param="scheduler.async_scheduling",
            )
        check_both_or_neither("router", router, "tls_cert", "tls_key")
        check_address("router.worker_address", router.worker_address, lowest_port=0)
        check_address("worker.control_address", worker.control_address, lowest_port=0)
        check_address("worker.kv_events_address", worker.kv_events_address, lowest_port=0)
        replay_address = worker.kv_events_replay_address or worker.kv_events_address
        check_address("worker.kv_events_replay_address", replay_address, lowest_port=0)
        check_peer_addresses("agent", self.agent, "kv_events_address", "kv_events_replay_address")
        check_address("kvstore.bind_address", self.kvstore.bind_address, lowest_port=0)
        check_peer_addresses("kvstore", self.kvstore, "address")
        check_order("kvstore", self.kvstore, "heartbeat_interval_s < client_timeout_s")
        for address in worker.router_addresses:
            check_address("worker.router_addresses", address, lowest_port=1)
        check_order("worker", worker, "host_slot < workers_on_host")


def _check_connectors(connector: ConnectorSection) -> None:
    """Refuse a list of connectors that cannot be meant."""
    path, names = "connector.connectors", connector.connectors
    if names and connector.name != MULTI_CONNECTOR:
        raise ConfigError(f"{path} is for connector.name = multi, not {connector.name!r}", param=path)
    if not names and connector.name == MULTI_CONNECTOR:
        raise ConfigError(f"connector.name = multi needs {path}, such as [p2p, offload]", param=path)
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"{path}: {twice!r} is named twice", param=path)
    if MULTI_CONNECTOR in names:
        raise ConfigError(f"{path}: 'multi' cannot be one of its own parts", param=path)


def _check_transports(path: str, transports: Sequence[str], *, is_p2p: bool) -> None:
    """Refuse transports that connector p2p does not have; another connector gives the setting its own meaning."""
    unknown = [name for name in transports if name not in P2P_TRANSPORTS]
    if is_p2p and unknown:
        raise ConfigError(f"{path}: {unknown[0]!r} is not a transport; allowed: {', '.join(P2P_TRANSPORTS)}", param=path)


def _check_ec_connector(config: KVFerryConfig) -> None:
    """Refuse embeddings that no worker could read, and embeddings that could fill the store of the KV blocks."""
    ec_connector, kvstore = config.ec_connector, config.kvstore
    _check_transports("ec_connector.transports", ec_connector.transports, is_p2p=ec_connector.name == "p2p")
    if ec_connector.kvstore_address:
        check_address("ec_connector.kvstore_address", ec_connector.kvstore_address, lowest_port=1)
    elif ec_connector.name == "shared" and not (kvstore.address or config.local.kvstore):
        raise ConfigError(
            "ec_connector.name = shared needs a store that workers share: set kvstore.address, or ec_connector.kvstore_address",
            param="ec_connector.kvstore_address",
        )
    elif ec_connector.name == "shared" and "store" in config.connector.names and not kvstore.block_bytes:
        raise ConfigError(
            "ec_connector.name = shared with connector store: set kvstore.block_bytes to the size of a KV block, or the store "
            "has room for whichever comes first; or give embeddings a store of their own, ec_connector.kvstore_address",
            param="kvstore.block_bytes",
        )


def _check_lmcache(lmcache: LMCacheSection) -> None:
    """Refuse addresses at which no LMCache server can be."""
    check_address("connector.lmcache.server_address", lmcache.server_address, lowest_port=1)
    if not lmcache.http_address.startswith("http://"):
        path = "connector.lmcache.http_address"
        raise ConfigError(f"{path} = {lmcache.http_address!r}: expected http://host:port", param=path)


def load_config(
    path: Path | None = None,
    assignments: Sequence[str] = (),
    overrides: Mapping[str, Any] | None = None,
) -> KVFerryConfig:
    """Merge a file, then ``a.b=c`` assignments, then overrides by dotted path (flags), and validate the result.

    The text of an assignment is taken as it stands where the setting is text (``router.api_key=007``), split at commas where
    it is a list of texts (``connector.transports=shm,tcp``, or in brackets), and read as YAML elsewhere. Bytes and tokens may
    be sizes such as ``1GiB``, ``512MiB`` or ``64k`` (``core.config_tree.parse_size``).

    Raises:
        ConfigError: the file cannot be read, a key does not exist, or a value is out of range; names its path and what is
            allowed.
    """
    tree = read_file(path) if path else {}
    for assignment in assignments:
        key, sign, text = assignment.partition("=")
        if not sign:
            raise ConfigError(f"--set {assignment!r}: expected a.b=value", param=assignment)
        put(tree, key.strip(), parse_value(text, kind_of(KVFerryConfig, key.strip())))
    for key, value in (overrides or {}).items():
        put(tree, key, value)
    check_keys(tree, KVFerryConfig)
    tree = read_sizes(tree, KVFerryConfig)
    try:
        return msgspec.convert(tree, KVFerryConfig, strict=False)
    except msgspec.ValidationError as error:
        cause = error.__cause__
        if isinstance(cause, ConfigError):
            raise cause from None
        raise explain(error, KVFerryConfig, tree) from None


def dump_config(config: KVFerryConfig) -> str:
    """Return every setting as JSON that ``load_config`` reads back, from a file or from ``STDIN``."""
    return msgspec.json.format(msgspec.json.encode(config)).decode()
