"""Settings of the router, of a local cluster as a whole, and of what all processes share: keys, log and traces.

Owns their sections: names, defaults and bounds. ``core.config`` says what two settings mean together.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from core.config_types import (
    Milliseconds,
    NonNegative,
    Port,
    Positive,
    Seconds,
    Section,
    Share,
    default_api_key,
    default_cluster_key,
    default_other_cluster_keys,
)


class ImagesSection(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Images that clients send, for a model that reads them."""

    max_count: Annotated[int, msgspec.Meta(ge=0, le=256)] = 16  # of one request; 0 = none are taken
    max_bytes: Annotated[int, msgspec.Meta(ge=1, le=20 << 20)] = 8 << 20  # of one file
    max_total_bytes: Annotated[int, msgspec.Meta(ge=1, le=40 << 20)] = 32 << 20  # of a request's files; a frame holds the most
    max_pixels: Annotated[int, msgspec.Meta(ge=1, le=64 << 20)] = 12 << 20  # of one image; no worker decodes more than the most
    allowed_hosts: tuple[str, ...] = ()  # of http(s) URLs: name, *.name, either with :port, address or network; none = refused
    fetch_timeout_s: Seconds = 5.0  # per image, with its redirects; and again for its turn
    max_redirects: NonNegative = 3
    max_fetches: Positive = 32  # of all clients at a time; one host leaves a quarter to others
    encode_timeout_s: Seconds = 20.0  # after that the prefill worker computes a request's embeddings itself


class PlannerSection(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Switches roles of workers with worker.can_switch_role between prefill and decode, by the load of both."""

    enabled: bool = False
    interval_s: Seconds = 5.0  # between two looks at the load
    max_wait_s: Seconds = 1.0  # of a prompt at prefill workers; a longer wait calls for another one
    max_itl_ms: Milliseconds = 0.0  # between two tokens at decode workers; a longer time calls for another one; 0 = any is fine
    low: Share = 0.7  # a role gives a worker away only if the load of each other one stays at most this
    hold_s: Seconds = 15.0  # how long the reason for a switch must last
    cooldown_s: Seconds = 60.0  # between two switches
    min_prefill: Positive = 1  # workers that keep this role
    min_decode: Positive = 1


class RouterSection(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The OpenAI front and the workers' meeting point."""

    host: str = "127.0.0.1"
    port: Port = 8000
    processes: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1  # that share `port`; process k has the k-th worker and ops port
    shares_port: bool = False  # other routers of this machine may listen at `port` as well
    processes_at_port: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1  # of which this is one; what starts several sets it
    process_number: NonNegative = 0  # which of them this is, from 0
    worker_address: str = "tcp://127.0.0.1:5570"  # ZeroMQ ROUTER; port 0 = any
    heartbeat_interval_s: Seconds = 1.0
    heartbeat_timeout_s: Seconds = 5.0
    request_timeout_s: Seconds = 600.0
    max_body_bytes: Positive = 12 << 20  # of one request: an image of images.max_bytes as a data URL, and text
    max_upload_bytes: Positive = 256 << 20  # of all bodies that are held at a time; more is a 503, of one request alone a 400
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
    fair_shares: bool = True  # under overload clients with different API keys get equal shares of it; needs `api_key`
    max_prompt_tokens: NonNegative = 0  # longer prompts are refused with 400; 0 = what the model allows
    text_threads: Annotated[int, msgspec.Meta(ge=1, le=64)] = 2  # tokenize long texts and fill in long conversations
    tool_format: str = "auto"  # of tool calls in a model's output, a name of kvferry.tool_formats; auto: by its chat template
    tools_in_prompt: Literal["template", "hermes"] = "template"  # hermes: in messages, if the template reads no tools
    max_retries: NonNegative = 2  # per request: how many workers may fail it; refusals, pauses, stalls come on top
    drain_timeout_s: Seconds = 30.0  # how long requests in flight may take to end when the router is asked to leave
    # How the worker that computes a prompt is chosen: by the predicted time to the first token, prefixes in its cache counted,
    # or by the share of its slots or of its KV cache taken, whichever is larger.
    routing: Literal["predicted", "least_loaded"] = "predicted"
    local_prefill_itl_ms: Milliseconds = 0.0  # a decode worker computes a prompt if its steps stay within this; 0 = never
    worker_wait_s: Seconds = 10.0  # how long an accepted request waits for a worker that no supervisor is known to restart
    api_key: str = msgspec.field(default_factory=default_api_key)  # clients send it as a bearer token; several: by commas
    requires_api_key: bool = False  # the router does not start without one, such as where a secret should hold it
    cors_origins: tuple[str, ...] = ()  # of web pages whose scripts may call the API, such as https://chat.example; * = all
    tls_cert: str = ""  # file of the certificate and those up to its root; clients then use https; empty = http
    tls_key: str = ""  # file of its key, without a password
    images: ImagesSection = ImagesSection()
    planner: PlannerSection = PlannerSection()


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
