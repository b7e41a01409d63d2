"""Builders shared by the engine's tests: sampling rows, tiny real engines, their oracles, a connector that copies blocks."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from core.clock import SystemClock
from core.config import load_config
from core.connector import Connector, KVConnectorScheduler, KVConnectorWorker
from core.engine.build import BuiltEngine, build_engine
from core.engine.core import EngineCore
from core.engine.sampling_state import SamplingRows, build_edits
from core.kv.pool_region import KVPoolRegion
from core.model.arch import model_fingerprint, parse_arch
from core.model.hub import ModelFiles
from core.model.image_file import read_image_size
from core.model.image_prompt import ImagePrompts, PromptImage, load_image_prompts
from core.model.tokenizer import Tokenizer
from core.request import EngineCoreOutput, KVConnectorMetadata, KVConnectorOutput, NewRequest
from core.wire.sampling import SamplingParams
from tests.support.tiny_smolvlm import ReferenceSmolVLM

VOCAB = 211
BLOCK = 16
MAILBOX_DEADLINE_S = 20.0


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def sampling_rows() -> Callable[..., SamplingRows]:
    """Return a builder of rows from (params, prompt, output[, choice_index[, stop_token_ids]]) tuples."""

    def build(*requests) -> SamplingRows:
        rows = SamplingRows(max(1, len(requests)))
        for row, (params, prompt, output, *rest) in enumerate(requests):
            choice_index = rest[0] if rest else 0
            stop = rest[1] if len(rest) > 1 else ()
            rows.put(row, params, choice_index, len(output), build_edits(params, stop, prompt, output))
        return rows

    return build


@pytest.fixture
def greedy() -> SamplingParams:
    return SamplingParams(temperature=0.0)


@dataclass
class Oracle:
    """The same model in transformers, one sequence at a time."""

    model: PreTrainedModel
    margin: float = 1e-3

    def logits(self, token_ids) -> torch.Tensor:
        with torch.inference_mode():
            return self.model(torch.tensor([list(token_ids)])).logits[0]

    def assert_greedy(self, prompt, output) -> None:
        """``output`` is what the model says, or leaves it first where its two best logits are less than ``margin`` apart."""
        rows = self.logits([*prompt, *output])[len(prompt) - 1 : -1]
        for position, (row, token) in enumerate(zip(rows, output, strict=True)):
            best = row.topk(2)
            if token != int(best.indices[0]):
                gap = float(best.values[0] - best.values[1])
                assert gap < self.margin, f"token {position} is {token}, not {int(best.indices[0])} (gap {gap:.2g})"
                return


@pytest.fixture(scope="session")
def make_oracle() -> type[Oracle]:
    return Oracle


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory) -> tuple[Path, Oracle]:
    """A random Llama with spread-out logits, as a folder and as its oracle."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0.0, 0.2)
    folder = tmp_path_factory.mktemp("tiny-llama")
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps({}))
    return folder, Oracle(model)


@pytest.fixture
def oracle(tiny_llama) -> Oracle:
    return tiny_llama[1]


@pytest.fixture
def build_tiny(tiny_llama, tmp_path) -> Iterable[Callable[..., BuiltEngine]]:
    """Return a builder of engines of the tiny model; keyword arguments are settings by ``section__name``."""
    built: list[BuiltEngine] = []

    def build(connector_factory=None, has_readers=False, ec_connector_factory=None, **settings) -> BuiltEngine:
        overrides = {
            "model.name": str(tiny_llama[0]),
            "model.cache_dir": str(tmp_path),
            "cache.block_size": BLOCK,
            "cache.num_blocks": 200,
            **{name.replace("__", "."): value for name, value in settings.items()},
        }
        config = load_config(overrides=overrides)
        factories = connector_factory, ec_connector_factory
        built.append(build_engine(config, SystemClock(), *factories, incarnation=5, has_readers=has_readers))
        return built[-1]

    yield build
    for one in built:
        one.engine.shutdown()
        one.pool.close()


@dataclass
class Finished:
    """Everything an engine has said about one request."""

    token_ids: list[int] = field(default_factory=list)
    outputs: list[EngineCoreOutput] = field(default_factory=list)

    @property
    def finish_reason(self):
        return self.outputs[-1].finish_reason


@pytest.fixture
def run_engine() -> Callable[..., dict[str, Finished]]:
    """Return a driver: feeds requests (all at once, or ``per_step`` before each step) and steps until all is done."""

    def run(engine: EngineCore, requests: Iterable[NewRequest], per_step: int = 10**9, after_step=None) -> dict[str, Finished]:
        waiting = list(requests)
        found: dict[str, Finished] = {}
        while waiting or engine.has_work():
            for new in waiting[:per_step]:
                engine.add_request(new)
            del waiting[:per_step]
            for output in engine.step():
                finished = found.setdefault(output.request_id, Finished())
                assert not finished.outputs or finished.finish_reason is None, "news after the end"
                finished.token_ids += output.new_token_ids
                finished.outputs.append(output)
            if after_step is not None:
                after_step(engine)
        return found

    return run


class Mailbox:
    """What an engine thread has said, and a way to wait for more of it."""

    def __init__(self):
        self._changed = threading.Condition()
        self.tokens = {}
        self.ends = {}
        self.deaths = []

    def on_outputs(self, outputs):
        with self._changed:
            for output in outputs:
                self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.finish_reason is not None:
                    self.ends[output.request_id] = output
            self._changed.notify_all()

    def on_death(self, error):
        with self._changed:
            self.deaths.append(error)
            self._changed.notify_all()

    def wait(self, condition):
        with self._changed:
            assert self._changed.wait_for(condition, MAILBOX_DEADLINE_S), "nothing happened"


@pytest.fixture
def make_mailbox() -> type[Mailbox]:
    return Mailbox


@dataclass
class ImageRouter:
    """The router's part for a model that sees images: conversations to requests."""

    tiny: ReferenceSmolVLM
    tokenizer: Tokenizer
    prompts: ImagePrompts
    fingerprint: bytes

    def request(self, name: str, parts: Iterable[str | bytes], **changes) -> NewRequest:
        images = [PromptImage(part, read_image_size(part)) for part in parts if isinstance(part, bytes)]
        text = self.prompts.expand(self.tiny.render(*parts), [image.size for image in images])
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        features, media = self.prompts.features(token_ids, images, self.fingerprint)
        sampling = SamplingParams(temperature=0.0, max_tokens=changes.pop("max_tokens", 12))
        new = {"mm_features": features, "media": media, **changes}
        return NewRequest(request_id=name, prompt_token_ids=token_ids, sampling=sampling, **new)


@pytest.fixture
def make_image_router() -> Callable[[ReferenceSmolVLM, ModelFiles], ImageRouter]:
    def make(tiny: ReferenceSmolVLM, files: ModelFiles) -> ImageRouter:
        tokenizer = Tokenizer(files)
        fingerprint = model_fingerprint(parse_arch(files.config), files.weights_id)
        return ImageRouter(tiny, tokenizer, load_image_prompts(files, tokenizer), fingerprint)

    return make


@pytest.fixture
def image_router(make_image_router, tiny_smolvlm, tiny_smolvlm_files) -> ImageRouter:
    return make_image_router(tiny_smolvlm, tiny_smolvlm_files)


@pytest.fixture
def build_smolvlm(tiny_smolvlm, build_tiny) -> Callable[..., BuiltEngine]:
    """Return a builder of engines of a tiny model that sees images."""
    return lambda **settings: build_tiny(model__name=str(tiny_smolvlm.folder), **settings)


class CopyMetadata(KVConnectorMetadata):
    """(request id, source blocks, own blocks) of every load that starts in this step."""

    def __init__(self, loads, preempted) -> None:
        self.loads = loads
        self.preempted = preempted


class CopyConnectorScheduler(KVConnectorScheduler):
    """Offers the tokens of requests whose KV lies in another engine's pool: {request id: (num_tokens, block ids)}."""

    def __init__(self, sources, is_async: bool) -> None:
        self.sources = sources
        self.is_async = is_async
        self._loads = []

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        num_tokens = self.sources.get(request.request_id, (0, []))[0]
        if request.num_preemptions or num_tokens <= num_computed_tokens:
            return 0, False
        return num_tokens - num_computed_tokens, self.is_async

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if not num_external_tokens:
            return
        (own,) = blocks.get_block_ids()
        source = self.sources[request.request_id][1]
        first = (self.sources[request.request_id][0] - num_external_tokens) // BLOCK
        self._loads.append((request.request_id, source[first:], own[first : len(source)]))

    def build_connector_meta(self, scheduler_output):
        loads, self._loads = self._loads, []
        return CopyMetadata(loads, set(scheduler_output.preempted_req_ids))


class CopyConnectorWorker(KVConnectorWorker):
    """Copies blocks when told to, and keeps a log of every call. With ``hold`` loads do not end.

    The source blocks in ``bad`` bring NaN and are reported; those in ``late`` may be written later, too, until it is empty.
    """

    def __init__(self, source: torch.Tensor | None, is_async: bool, hold: bool = False) -> None:
        self.source = source
        self.is_async = is_async
        self.hold = hold
        self.calls: list[str] = []
        self.raises: dict[str, Exception] = {}
        self.pool: KVPoolRegion | None = None
        self.bad: set[int] = set()
        self.late: set[int] = set()
        self.quarantined: set[int] = set()
        self._invalid: set[int] = set()
        self._loading: list = []

    def _note(self, name: str) -> None:
        self.calls.append(name)
        if name in self.raises:
            raise self.raises[name]

    def register_kv_caches(self, pool):
        self.pool = pool

    def handle_preemptions(self, metadata):
        self._note("handle_preemptions")

    def start_load_kv(self, metadata):
        self._note("start_load_kv")
        for load in metadata.loads:
            self._loading.append(load)
            if not self.is_async:
                self._copy(load)
        if not self.is_async:
            self._loading.clear()

    def wait_for_save(self):
        self._note("wait_for_save")

    def get_transfer_results(self, finished_req_ids):
        self._note("get_transfer_results")
        if self.hold:
            return KVConnectorOutput()
        ended, self._loading = self._loading, []
        before = set(self.quarantined)
        for load in ended:
            self._copy(load)
        output = KVConnectorOutput(finished_recving={load[0] for load in ended})
        output.quarantined_block_ids = self.quarantined - before
        if not self.late:
            output.unquarantined_block_ids, self.quarantined = self.quarantined, set()
        return output

    def get_block_ids_with_load_errors(self):
        self._note("get_block_ids_with_load_errors")
        invalid, self._invalid = self._invalid, set()
        return invalid

    def bring_late_bytes(self) -> None:
        """Write NaN into all that is in quarantine."""
        for own in self.quarantined:
            self._rows()[own] = 0xFF

    def shutdown(self):
        self._note("shutdown")

    def _rows(self) -> torch.Tensor:
        return torch.frombuffer(self.pool.buffer, dtype=torch.uint8).view(self.pool.num_blocks, -1)

    def _copy(self, load) -> None:
        rows = self._rows()
        theirs = self.source.view(torch.uint8).view(len(self.source), -1)
        for source, own in zip(load[1], load[2], strict=True):
            rows[own] = 0xFF if source in self.bad | self.late else theirs[source]
            if source in self.bad | self.late:
                self._invalid.add(own)
            if source in self.late:
                self.quarantined.add(own)


@dataclass
class CopyConnector(Connector):
    """Both sides."""

    scheduler: CopyConnectorScheduler
    worker: CopyConnectorWorker

    def __call__(self, layout, fingerprint):
        return self


@pytest.fixture
def copy_connector() -> Callable[..., CopyConnector]:
    def build(sources=None, source=None, is_async=True, hold=False) -> CopyConnector:
        return CopyConnector(
            CopyConnectorScheduler(sources if sources is not None else {}, is_async),
            CopyConnectorWorker(source, is_async, hold),
        )

    return build
