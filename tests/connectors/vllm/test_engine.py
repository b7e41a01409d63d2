"""What is read from vLLM's configuration of its KV cache."""

import copy
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from connectors.vllm.engine import can_name_blocks, check_role, check_supported, model_identity, transfer_groups
from core.errors import ConfigError


@dataclass(frozen=True)
class FullAttentionSpec:
    """vLLM's, of full layers; with a window if it holds sliding layers as well."""

    sliding_window: int | None = None


@dataclass(frozen=True)
class SlidingWindowSpec:
    """vLLM's, of sliding layers."""

    sliding_window: int = 64
    extra_retained_tokens: int = 0


def kv_cache(*specs):
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    return SimpleNamespace(kv_cache_groups=groups, transfer_group_ids=list(range(len(specs))))


@pytest.mark.parametrize(
    ("specs", "windows", "can_name"),
    [
        ([FullAttentionSpec()], (None,), True),
        ([FullAttentionSpec(64)], (None,), True),
        ([SlidingWindowSpec()], (64,), False),
        ([SlidingWindowSpec(64, extra_retained_tokens=3)], (67,), False),
        ([FullAttentionSpec(), SlidingWindowSpec()], (None, 64), False),
        ([SimpleNamespace(kv_cache_specs={"a": SlidingWindowSpec(), "b": SlidingWindowSpec()})], (64,), False),
        ([SimpleNamespace(kv_cache_specs={"a": FullAttentionSpec(64), "b": FullAttentionSpec()})], (None,), True),
    ],
    ids=[
        "full",
        "full, of sliding layers too",
        "sliding",
        "sliding, kept longer",
        "both",
        "sliding, several sizes",
        "full, several sizes",
    ],
)
def test_only_groups_that_vllm_manages_as_windows_have_one(specs, windows, can_name):
    config = kv_cache(*specs)
    assert transfer_groups(config).windows == windows
    assert can_name_blocks(config) is can_name


def config_with(multimodal=None, **model):
    sizes = dict.fromkeys(("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"), 1)
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**sizes),
        cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256", enable_prefix_caching=False),
        model_config=SimpleNamespace(
            **{"enable_sleep_mode": False, "enable_cumem_allocator": False, **model}, multimodal_config=multimodal
        ),
    )


def test_groups_that_vllm_does_not_transfer_are_refused():
    caches = kv_cache(FullAttentionSpec(), FullAttentionSpec())
    caches.transfer_group_ids = [0]
    with pytest.raises(ConfigError, match="only 1 of its 2 groups"):
        check_supported(config_with(), caches)


@pytest.mark.parametrize("name", ["enable_sleep_mode", "enable_cumem_allocator"])
def test_memory_that_can_be_replaced_under_its_readers_is_refused(name):
    with pytest.raises(ConfigError, match=f"does not support {name}: after a sleep"):
        check_supported(config_with(**{name: True}), kv_cache(FullAttentionSpec()))


def test_images_that_vllm_would_number_are_refused():
    config = config_with(SimpleNamespace(mm_processor_cache_gb=0))
    with pytest.raises(ConfigError, match="numbers images instead of hashing them"):
        check_supported(config, kv_cache(FullAttentionSpec()))


def transfer_config(role, connector="KvferryConnector"):
    return SimpleNamespace(kv_connector=connector, kv_role=role, is_kv_consumer=role in ("kv_consumer", "kv_both"))


@pytest.mark.parametrize("role", ["kv_consumer", "kv_both"])
def test_a_role_around_ours_under_which_loads_could_be_overwritten_is_refused(role):
    with pytest.raises(ConfigError, match=f"kv_role = {role} .* MultiConnector with kv_role = kv_producer"):
        check_role(transfer_config(role), transfer_config("kv_producer", "MultiConnector"))


@pytest.mark.parametrize(
    ("own", "outer"),
    [("kv_both", "kv_both"), ("kv_both", "kv_consumer"), ("kv_producer", "kv_producer"), ("kv_producer", "kv_both")],
)
def test_other_roles_around_ours_are_safe(own, outer):
    check_role(transfer_config(own), transfer_config(outer, "MultiConnector"))


@dataclass(frozen=True)
class Scheme:
    """vLLM's ``QuantKey``: how numbers are stored."""

    dtype: torch.dtype


@dataclass
class Rules:
    """vLLM's ``QuantizationConfigArgs``."""

    linear: Scheme | None = None
    ignore: list[str] = field(default_factory=list)


def identity_with(rules, quantization="online"):
    model = SimpleNamespace(
        model="tiny",
        revision=None,
        hf_config=SimpleNamespace(to_dict=dict),
        dtype=torch.bfloat16,
        quantization=quantization,
        quantization_config=rules,
    )
    return model_identity(SimpleNamespace(model_config=model, speculative_config=None), "0.32", "", [])


RULES = [
    None,
    {"ignore": ["re:.*self_attn.*"]},
    {"ignore": ["re:.*mlp.*"]},
    Rules(Scheme(torch.float8_e4m3fn)),
    Rules(Scheme(torch.int8)),
    Rules(Scheme(torch.int8), ["re:.*self_attn.*"]),
]


def test_weights_that_other_rules_quantize_are_others():
    identities = [identity_with(rules) for rules in RULES]
    assert len(set(identities)) == len(RULES)
    assert identities == [identity_with(copy.deepcopy(rules)) for rules in RULES]


def test_the_order_of_layers_that_are_not_quantized_has_no_meaning():
    """vLLM asks whether any of the patterns matches."""
    spellings = [["re:.*a", "re:.*b"], ["re:.*b", "re:.*a"], ["re:.*a", "re:.*b", "re:.*a"]]
    assert len({identity_with({"ignore": ignore}) for ignore in spellings}) == 1
    assert len({identity_with(Rules(ignore=ignore)) for ignore in spellings}) == 1


def test_rules_of_quantization_have_the_same_digest_in_every_process():
    assert identity_with(None, "fp8").quantization == "fp8"
    assert identity_with(Rules(Scheme(torch.int8))).quantization == "online:35cccdee00eb4acdda13e64a7ef9c65d"
