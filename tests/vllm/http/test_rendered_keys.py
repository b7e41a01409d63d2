"""Images and LoRA adapters through our router: the answers are those of vLLM alone, by handoffs of their own."""

import base64
import contextlib

import httpx
import pytest

from tests.support.routed_servers import RoutedServers
from tests.support.tiny_models import LORA_RANK, write_tiny_lora
from tests.support.tiny_smolvlm import build_tiny_smolvlm, encode_test_image
from tests.support.vllm_pair import vllm_pair
from tests.support.vllm_server import MODEL
from tests.vllm.conftest import settings

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.full]

CHAT = "/v1/chat/completions"


class Asked:
    """A router over P and D, and what it answers beside D alone."""

    def __init__(self, routed, d):
        self.routed, self.d = routed, d

    def check(self, **fields):
        """Compare an answer with D's alone, and check that it came by a handoff; return its text."""
        body = {"model": MODEL, "max_tokens": 12, "temperature": 0, "ignore_eos": True} | fields
        before = self._loads()
        ours = httpx.post(self.routed.base_url + CHAT, json=body, timeout=120)
        assert ours.status_code == 200, ours.text + self.routed.logs()
        status, alone = self.d.post(CHAT, body | {"cache_salt": "alone"})
        assert status == 200, alone
        (text,) = (choice["message"]["content"] for choice in ours.json()["choices"])
        assert [text] == [choice["message"]["content"] for choice in alone["choices"]]
        assert self._loads() == before + 1
        return text

    def _loads(self):
        return int(self.d.metric("vllm:kvferry_loads_total"))


@contextlib.contextmanager
def asked(folder, model, *arguments):
    with vllm_pair(folder, model, settings("tcp"), arguments) as (p, d):
        roles = {"p0": (p, "prefill"), "d0": (d, "decode")}
        with RoutedServers(folder, model, roles) as routed:
            yield Asked(routed, d)


def test_adapters_are_those_of_vllm_alone(served_model, tmp_path):
    adapters = {name: tmp_path / name for name in ("one", "other")}
    for seed, folder in enumerate(adapters.values()):
        folder.mkdir()
        write_tiny_lora(folder, seed)
    modules = [f"{name}={folder}" for name, folder in adapters.items()]
    flags = ("--enable-lora", "--max-lora-rank", str(LORA_RANK), "--max-loras", "2", "--lora-modules", *modules)
    with asked(tmp_path, served_model, *flags) as cluster:
        messages = [{"role": "user", "content": "".join(f"t{token}" for token in range(400, 700))}]
        texts = [cluster.check(messages=messages, model=name) for name in (MODEL, "one", "other")]
    assert len(set(texts)) == 3


def test_images_are_those_of_vllm_alone(tmp_path):
    model = tmp_path / "seeing"
    model.mkdir()
    build_tiny_smolvlm(model, model_type="idefics3", text={"hidden_size": 64, "num_attention_heads": 2})
    with asked(tmp_path, model) as cluster:
        texts = []
        for seed in (1, 2):
            url = f"data:image/png;base64,{base64.b64encode(encode_test_image(seed)).decode()}"
            parts = [{"type": "text", "text": "what is this"}, {"type": "image_url", "image_url": {"url": url}}]
            texts.append(cluster.check(messages=[{"role": "user", "content": parts}]))
    assert texts[0] != texts[1]
