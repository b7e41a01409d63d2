"""Steps of the engine on a device that is strict about where tensors lie and notes what the host waits for."""

from __future__ import annotations

import inspect
import json
import shutil

import numpy as np
import pytest
import torch
from torch.nn.attention.varlen import varlen_attn
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from core.attention import varlen
from core.attention.batched import BatchedSdpaBackend
from core.attention.pages import PagesBackend
from core.attention.varlen import VarlenBackend
from core.digest import BlockDigester
from core.engine import build
from core.engine.runner import ModelRunner
from core.kv.seals import decode_seal
from core.model.image_encoder import load_image_encoder
from core.model.image_file import read_image_size
from core.model.image_prompt import PromptImage, load_image_prompts
from core.model.tokenizer import Tokenizer
from core.request import NewRequest
from core.wire.sampling import SamplingParams
from tests.support.fake_cuda import ClaimedCuda, DeviceMisuse
from tests.support.tiny_smolvlm import encode_test_image
from tests.support.varlen_kernel import documented_varlen_attn, documented_varlen_attn_with_sums

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="a stand-in for a CUDA device, where there is none"),
]

# Torch 2.11 passes no block tables on: varlen is refused there, and pages calls an operator instead.
TORCHS = varlen_attn if "block_table" in inspect.signature(varlen_attn).parameters else None
VOCAB = 211
RECORDED = ["varlen", "pages", "gather"]
EDITED = {
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.7},
    "bias": {"logit_bias": {9: 3.0}, "min_tokens": 4, "stop": [5, 6]},
    "allowed": {"allowed_token_ids": [3, 4, 7, 90], "temperature": 1.0, "seed": 6},
}


class Device:
    """The device, and what the host has waited for in the launches of steps."""

    def __init__(self):
        self.cuda = ClaimedCuda()
        self.waits = []


@pytest.fixture
def device(build_tiny, monkeypatch):
    found = Device()
    monkeypatch.setattr(VarlenBackend, "kernel", staticmethod(found.cuda.kernel(documented_varlen_attn, TORCHS)))
    monkeypatch.setattr(PagesBackend, "kernel", staticmethod(found.cuda.kernel(documented_varlen_attn_with_sums, TORCHS)))
    monkeypatch.setattr(varlen, "activate_paged_kernel", lambda device: "FA3")
    launch = ModelRunner.launch_model

    def watched(runner, step):
        with found.cuda.launching() as waits:
            result = launch(runner, step)
        found.waits += waits
        return result

    monkeypatch.setattr(ModelRunner, "launch_model", watched)
    with found.cuda.installed():
        yield found


def requests(*kinds, lengths=(1, 15, 33, 50, 9), max_tokens=5, **sampling):
    generator = np.random.default_rng(4)
    prompts = [generator.integers(3, VOCAB, length).tolist() for length in lengths]
    kinds = kinds or ({},) * len(lengths)
    return [
        NewRequest(
            request_id=f"r{number}",
            prompt_token_ids=prompt,
            stop_token_ids=frozenset(kind.pop("stop", ())),
            sampling=SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, **sampling, **kind}),
        )
        for number, (prompt, kind) in enumerate(zip(prompts, map(dict, kinds), strict=False))
    ]


def said(found):
    return {
        name: (
            finished.token_ids,
            finished.finish_reason,
            [(entry.token_ids, entry.rank) for output in finished.outputs for entry in output.logprobs or ()],
            [entry and (entry.token_ids, entry.rank) for output in finished.outputs for entry in output.prompt_logprobs or ()],
        )
        for name, finished in found.items()
    }


@pytest.fixture
def run_there(build_tiny, run_engine):
    """Return a function that serves requests on the device."""

    def run(asked, **settings):
        settings = {"model__device": "cuda", "model__dtype": "float32", "model__max_model_len": 64, **settings}
        built = build_tiny(scheduler__max_num_batched_tokens=48, scheduler__max_num_seqs=4, **settings)
        return built, said(run_engine(built.engine, asked, per_step=2))

    return run


@pytest.fixture
def run_here(build_tiny, run_engine):
    """Return a function that serves requests on the CPU."""

    def run(asked, **settings):
        settings = {"model__device": "cpu", "model__max_model_len": 64, **settings}
        return said(run_engine(build_tiny(scheduler__max_num_batched_tokens=48, **settings).engine, asked, per_step=2))

    return run


KINDS = [
    {},
    {"temperature": 1.0, "seed": 3, "top_p": 0.9},
    {"temperature": 0.8, "seed": 4, "top_k": 20, "min_p": 0.01},
    {"logprobs": 2},
    {"temperature": 1.0, "seed": 9, "logprobs": 0},
]


@pytest.mark.parametrize(
    ("backend", "graphs"),
    [
        ("varlen", True),
        ("pages", True),
        ("gather", True),
        pytest.param("sdpa", True, marks=pytest.mark.full),
        pytest.param("varlen", False, marks=pytest.mark.full),
        pytest.param("pages", False, marks=pytest.mark.full),
        pytest.param("gather", False, marks=pytest.mark.full),
    ],
)
def test_the_host_waits_for_nothing_while_it_launches_steps(run_here, run_there, device, backend, graphs):
    expected = run_here(requests(*KINDS))
    built, found = run_there(requests(*KINDS), model__attention=backend, model__cuda_graphs=graphs)
    assert found == expected
    assert device.waits == []
    assert built.engine.runner._attention.name == backend
    assert bool(device.cuda.num_replayable) == (graphs and backend in RECORDED)


@pytest.mark.parametrize("kind", EDITED)
def test_edited_logits_make_the_host_wait_for_the_step_before_and_nothing_else(run_here, run_there, device, kind):
    asked = requests(EDITED[kind], {}, EDITED[kind])
    expected = run_here(asked)
    _, found = run_there(asked, model__attention="gather")
    assert found == expected
    assert {wait.partition(",")[0] for wait in device.waits} == {"an event"}


def test_log_probabilities_of_prompts_are_those_of_the_cpu(run_here, run_there, device):
    asked = requests({"prompt_logprobs": 2}, {}, {"prompt_logprobs": 0}, {"prompt_logprobs": 1})
    expected = run_here(asked)
    _, found = run_there(asked, model__attention="gather")
    assert found == expected
    assert device.waits


@pytest.fixture(scope="module")
def tiny_gemma3(tmp_path_factory):
    """A random model of sliding windows and full attention."""
    torch.manual_seed(5)
    sizes = {"vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "head_dim": 16}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "query_pre_attn_scalar": 16, "sliding_window": 24}
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = Gemma3TextConfig(**sizes, **heads, layer_types=kinds, max_position_embeddings=512, bos_token_id=1, eos_token_id=2)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.3 if "norm" in name else 0.2)
    folder = tmp_path_factory.mktemp("gemma3")
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps({}))
    return str(folder)


@pytest.mark.parametrize(
    "backend", ["varlen", pytest.param("pages", marks=pytest.mark.full), pytest.param("gather", marks=pytest.mark.full)]
)
def test_groups_of_layers_with_windows_wait_for_nothing_either(tiny_gemma3, run_here, run_there, device, backend):
    asked = requests(lengths=(52, 20, 33))
    expected = run_here(asked, model__name=tiny_gemma3)
    built, found = run_there(asked, model__name=tiny_gemma3, model__attention=backend)
    assert found == expected
    assert device.waits == []
    assert len(built.pool.config.groups) > 1


def test_images_are_embedded_and_merged_without_a_wait(tiny_smolvlm, tiny_smolvlm_files, build_tiny, run_engine, device):
    tokenizer = Tokenizer(tiny_smolvlm_files)
    prompts = load_image_prompts(tiny_smolvlm_files, tokenizer)
    fingerprint = load_image_encoder(tiny_smolvlm_files, torch.float32).model_fingerprint
    parts = (encode_test_image(0), "what is in this image?")
    image = PromptImage(parts[0], read_image_size(parts[0]))
    text = prompts.expand(tiny_smolvlm.render(*parts), [image.size])
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    features, media = prompts.features(token_ids, [image], fingerprint)
    sampling = SamplingParams(temperature=0.0, max_tokens=6)
    new = NewRequest(request_id="r", prompt_token_ids=token_ids, sampling=sampling, mm_features=features, media=media)
    settings = {"model__device": "cuda", "model__dtype": "float32", "model__attention": "gather", "scheduler__max_num_seqs": 1}
    built = build_tiny(model__name=str(tiny_smolvlm.folder), scheduler__max_num_batched_tokens=48, **settings)
    found = run_engine(built.engine, [new])
    tiny_smolvlm.assert_greedy(found["r"].token_ids, *parts)
    assert built.engine.stats.num_encoder_computed == 1
    assert device.waits == []


def test_digests_of_blocks_on_the_device_are_those_of_their_bytes(build_tiny, run_engine, device):
    settings = {"model__device": "cuda", "model__attention": "gather", "model__cuda_graphs": False}
    built = build_tiny(has_readers=True, connector__transports=["tcp"], **settings)
    run_engine(built.engine, requests(lengths=(70, 40)))
    rows = built.pool.cache.pool.elements.flatten(1).view(torch.uint8).numpy()
    digester = BlockDigester(rows.shape[1])
    sealed = {block_id: seal for block_id in range(built.num_blocks) if (seal := decode_seal(built.pool.seals.row(block_id)))}
    assert len(sealed) >= 5
    assert [seal.digest for seal in sealed.values()] == [digester.digest(rows[block_id]) for block_id in sealed]
    assert not [wait for wait in device.waits if "digest" in wait]


def test_a_pool_is_measured_and_filled_on_the_device(build_tiny, run_engine, device):
    device.cuda.total = device.cuda.free = (768 + 512 + 8) << 20  # context, graphs, and eight MiB
    settings = {"model__device": "cuda", "model__attention": "gather", "scheduler__max_num_seqs": 2}
    built = build_tiny(cache__num_blocks=0, cache__gpu_memory_utilization=1.0, **settings)
    assert 7 << 20 < built.pool.cache.pool.nbytes <= 8 << 20
    assert len(run_engine(built.engine, requests(lengths=(5, 6)))) == 2


def test_no_step_is_measured_that_is_longer_than_the_pool(build_tiny, tiny_llama, device, tmp_path, monkeypatch):
    folder = shutil.copytree(tiny_llama[0], tmp_path / "long")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    longest = []
    for name in ("run_longest_prefills", "run_widest_decode"):
        step = getattr(build, name)
        monkeypatch.setattr(build, name, lambda *args, step=step: longest.append(args[-1]) or step(*args))
    device.cuda.total = device.cuda.free = (768 + 512 + 0.25) * (1 << 20)  # context, graphs, and 256 KiB
    settings = {"model__device": "cuda", "model__attention": "gather", "scheduler__max_num_seqs": 2}
    built = build_tiny(model__name=str(folder), cache__num_blocks=0, cache__gpu_memory_utilization=1.0, **settings)
    assert len(longest) >= 2
    assert max(longest) <= built.num_blocks * 16


def without_waiting(runner, monkeypatch):
    monkeypatch.setattr(runner, "_mark", lambda: lambda: None)


def with_pageable_uploads(runner, monkeypatch):
    monkeypatch.setattr(inspect.getmodule(ModelRunner), "upload", lambda array, device: torch.from_numpy(array).to(device))


def with_positions_on_the_host(runner, monkeypatch):
    forward = runner.decoder.forward
    monkeypatch.setattr(runner.decoder, "forward", lambda ids, places, *rest: forward(ids, places.cpu(), *rest))


def with_a_look_at_the_logits(runner, monkeypatch):
    head = runner.decoder.compute_logits
    monkeypatch.setattr(runner.decoder, "compute_logits", lambda hidden: head(hidden) if bool(hidden.any()) else None)


MISTAKES = {
    without_waiting: "signed integer",  # garbage is no token
    with_pageable_uploads: "pageable memory",
    with_positions_on_the_host: "mixes",
    with_a_look_at_the_logits: "is_nonzero",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_of_a_step_are_noticed(build_tiny, run_engine, device, monkeypatch, mistake):
    settings = {"model__device": "cuda", "model__dtype": "float32", "model__attention": "gather", "model__cuda_graphs": False}
    built = build_tiny(scheduler__max_num_batched_tokens=48, model__max_model_len=64, **settings)
    mistake(built.engine.runner, monkeypatch)
    try:
        run_engine(built.engine, requests(lengths=(5, 20)), per_step=2)
    except (DeviceMisuse, OverflowError) as error:
        device.waits.append(str(error))
    assert any(MISTAKES[mistake] in wait for wait in device.waits)


def test_a_recording_that_looks_at_the_host_is_refused(build_tiny, run_engine, device, monkeypatch, caplog):
    plan = BatchedSdpaBackend.static_plan

    def without_masks(backend, *args):
        made = plan(backend, *args)
        made.seq_lens = made.seq_lens.cpu()  # so that the mask would be made on the host
        made.masks = {}
        return made

    monkeypatch.setattr(BatchedSdpaBackend, "static_plan", without_masks)
    settings = {"model__device": "cuda", "model__attention": "gather", "model__max_model_len": 64}
    built = build_tiny(scheduler__max_num_seqs=2, **settings)
    assert len(built.engine.runner.graphs) == 0
    assert "decode_graphs_off" in caplog.text
