"""What people get wrong in the first minutes: command lines, and the line that ends each of them.

``benchmarks/first_minutes.py`` measures how long they take; ``tests/kvferry/test_first_minutes.py`` holds the command to them.
``Surroundings`` makes what they refer to: a port in use, files that are no models, a model of a few kilobytes.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_SERVE = ("serve", "--model", "{model}", "--port", "0")


@dataclass(frozen=True, slots=True)
class Mistake:
    """A command line, and what its last line matches; ``{...}`` are fields of ``Surroundings`` in both."""

    name: str
    arguments: tuple[str, ...]
    last_line: str
    exit_code: int = 2


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the command lines refer to."""

    model: Path
    file: Path
    not_gguf: Path
    truncated_gguf: Path
    cut_model: Path
    empty: Path
    port: int
    free_port: int

    def fill(self, text: str, *, is_pattern: bool = False) -> str:
        """Put the fields into a text."""
        for name in self.__slots__:
            value = str(getattr(self, name))
            text = text.replace("{" + name + "}", value.replace(".", r"\.") if is_pattern else value)
        return text


@contextmanager
def surroundings(folder: Path) -> Iterator[Surroundings]:
    """Make everything below a folder, and listen on a port."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256, "rms_norm_eps": 1e-5}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    for name, end in (("model", 4), ("cut", 4000)):
        (folder / name).mkdir()
        config = {"model_type": "llama", "rope_theta": 10000.0, **shape, **heads}
        (folder / name / "config.json").write_text(json.dumps(config))
        (folder / name / "tokenizer.json").write_text("{}")
        head = json.dumps({"w": {"dtype": "F32", "shape": [end // 4], "data_offsets": [0, end]}}).encode()
        (folder / name / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + bytes(4))
    (folder / "file").touch()
    (folder / "random.gguf").write_bytes(b"no model at all, but of some length")
    (folder / "short.gguf").write_bytes(b"GGUF" + struct.pack("<I", 3) + b"\x01")
    (folder / "empty").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with socket.create_server(("127.0.0.1", 0)) as free:
            free_port = free.getsockname()[1]
        yield Surroundings(
            model=folder / "model",
            cut_model=folder / "cut",
            file=folder / "file",
            not_gguf=folder / "random.gguf",
            truncated_gguf=folder / "short.gguf",
            empty=folder / "empty",
            port=taken.getsockname()[1],
            free_port=free_port,
        )


def _set(*assignments: str) -> tuple[str, ...]:
    return tuple(part for assignment in assignments for part in ("--set", assignment))


_STORE = ("connector.name=store", "local.kvstore=true")

MISTAKES = (
    # ---- spelling
    Mistake("unknown command", ("server",), r"No such command 'server'"),
    Mistake("unknown flag", (*_SERVE, "--prefil", "2"), r"No such option: --prefil .*--prefill"),
    Mistake("unknown setting", (*_SERVE, *_set("cache.blok_size=16")), r"cache\.blok_size: did you mean cache\.block_size\?"),
    Mistake("setting without a value", (*_SERVE, *_set("cache.block_size")), r"'cache\.block_size': expected a\.b=value"),
    Mistake("file that is not there", (*_SERVE, "--config", "{empty}/c.yaml"), r"cannot read .*{empty}/c\.yaml.*No such file"),
    # ---- kinds and ranges of values
    Mistake("port that is no number", ("serve", "--port", "http"), r"router\.port = 'http': expected a whole number, .* 65535"),
    Mistake("port out of range", ("serve", "--port", "70000"), r"router\.port = '70000': .* at most 65535"),
    Mistake("size in words", (*_SERVE, *_set("cache.memory_bytes=1gig")), r"cache\.memory_bytes = '1gig': .* such as 1GiB"),
    Mistake("unknown dtype", (*_SERVE, "--dtype", "int3"), r"model\.dtype = 'int3': expected one of: auto, float32"),
    Mistake("block of no size", (*_SERVE, *_set("cache.block_size=7")), r"cache\.block_size = 7 is not a multiple of .* 16"),
    Mistake("unknown transport", (*_SERVE, "--transport", "rdma"), r"connector\.transports: 'rdma' .*allowed: shm, nixl, tcp"),
    Mistake(
        "lease renewed too late",
        (*_SERVE, *_set("connector.lease_s=4")),
        r"connector\.lease_renew_interval_s = 5 must be below connector\.lease_s = 4",
    ),
    Mistake("half a cluster", (*_SERVE, "--prefill", "0"), r"local\.num_prefill = 0 .*at least one of each is needed"),
    Mistake("setting of a worker", (*_SERVE, *_set("worker.ops_port=9100")), r"worker\.ops_port = 9100: .*leave it out"),
    Mistake("short cluster key", (*_SERVE, *_set("security.cluster_key=abc")), r"security\.cluster_key: .*kvferry keygen"),
    # ---- the model
    Mistake("unknown model", ("serve", "--model", "llama"), r"model\.name = 'llama' is no alias .*smollm2-135m.*owner/name"),
    Mistake("folder without a model", ("serve", "--model", "{empty}"), r"{empty} holds no config\.json"),
    Mistake("file that is no GGUF", ("serve", "--model", "{not_gguf}"), r"{not_gguf} cannot be read as a GGUF file"),
    Mistake("GGUF cut short", ("serve", "--model", "{truncated_gguf}"), r"{truncated_gguf} cannot be read .*ends in its head"),
    Mistake(
        "weights cut short",
        ("serve", "--model", "{cut_model}", "--port", "0"),
        r"{cut_model}/model\.safetensors is cut short: \d+ of \d+ bytes; fetch it again",
    ),
    Mistake(
        "longer than the model",
        (*_SERVE, "--max-model-len", "32k"),
        r"model\.max_model_len = 32000: the model allows 512",
    ),
    Mistake(
        "longer than the pool",
        (*_SERVE, "--max-model-len", "512", *_set("cache.num_blocks=4")),
        r"model\.max_model_len = 512: the KV pool holds 192, see cache\.memory_bytes",
    ),
    Mistake("pool of no block", (*_SERVE, *_set("cache.memory_bytes=1kB")), r"pool holds 0 .*cache\.memory_bytes = 1000"),
    Mistake("images for a model of text", (*_SERVE, "--encode", "1"), r"local\.num_encode = 1: .*reads text only"),
    Mistake(
        "cache folder below a file",
        ("serve", "--port", "0", *_set("model.cache_dir={file}/cache")),
        r"model\.cache_dir = '{file}/cache' cannot be written: Not a directory; .*KVFERRY_CACHE",
    ),
    # ---- the machine
    Mistake("GPU that is not there", (*_SERVE, *_set("model.device=cuda")), r"model\.device = 'cuda': .*; use cpu or auto"),
    Mistake(
        "API port in use",
        ("serve", "--model", "{model}", "--port", "{port}"),
        r"router\.port = {port}: cannot listen on 127\.0\.0\.1:{port}: Address already in use; stop what listens there",
    ),
    Mistake(
        "operations port in use",
        (*_SERVE, *_set("router.ops_port={port}")),
        r"router\.ops_port = {port}: cannot listen on .*in use",
    ),
    Mistake(
        "workers' port in use",
        (*_SERVE, *_set("router.worker_address=tcp://127.0.0.1:{port}")),
        r"router\.worker_address = {port}: cannot listen on .*in use",
    ),
    Mistake("address of another machine", (*_SERVE, "--host", "192.0.2.1"), r"cannot listen on 192\.0\.2\.1:0: .*assign"),
    Mistake(
        "one data port for two",
        (*_SERVE, "--prefill", "2", *_set("worker.data_port={free_port}")),
        r"worker\.data_port = {free_port}: 2 workers of this machine cannot share one port",
    ),
    Mistake("pools beyond the memory", (*_SERVE, *_set("cache.memory_bytes=9TiB")), r"2 KV pools of 9 TiB.*; lower them"),
    Mistake(
        "store beyond the memory",
        (*_SERVE, *_set(*_STORE, "kvstore.memory_bytes=9TiB")),
        r"kvstore\.memory_bytes: 9 TiB.*; lower them",
    ),
    Mistake(
        "disk tier below a file",
        (*_SERVE, *_set(*_STORE, "kvstore.disk_path={file}/tier")),
        r"kvstore\.disk_path = '{file}/tier' cannot be written: Not a directory",
    ),
    Mistake(
        "one disk tier for two stores",
        (*_SERVE, *_set("connector.name=store", "kvstore.disk_path={empty}/tier")),
        r"kvstore\.disk_path = '{empty}/tier': 2 workers .*local\.kvstore = true",
    ),
    Mistake(
        "certificate that is not there",
        (*_SERVE, *_set("router.tls_cert={empty}/cert.pem", "router.tls_key={empty}/key.pem")),
        r"router\.tls_cert = '{empty}/cert\.pem' and .* cannot be loaded: No such file",
    ),
    # ---- what is not installed
    Mistake(
        "unknown connector", (*_SERVE, *_set("connector.name=redis")), r"connector\.name = 'redis': no such .*known: .*p2p"
    ),
    # ---- commands beside serve
    Mistake("worker of no connector", ("prefill", *_set("connector.name=x")), r"connector\.name = 'x': no such connector"),
    Mistake(
        "drain of nothing",
        ("drain", "--ops-port", "{free_port}"),
        r"no worker listens at http://localhost:{free_port}: .*refused",
        1,
    ),
    Mistake(
        "probe of nothing",
        ("probe", "http://127.0.0.1:{free_port}", "--timeout", "0.5"),
        r"http://127\.0\.0\.1:{free_port}: .*refused",
        1,
    ),
    Mistake(
        "load on nothing",
        ("bench", "--url", "http://127.0.0.1:{free_port}"),
        r"cannot read the model name from http://127\.0\.0\.1:{free_port}/v1/models .*refused",
    ),
    Mistake("fetch of no model", ("models", "llama"), r"'llama' is no alias"),
)
