"""Lets vLLM's CPU backends use the layout BLHNC, in every process that has this folder in its PYTHONPATH.

Backends for GPUs support it by themselves. The backend of full and sliding attention declares LBHNC only, but computes the same
tokens with BLHNC. That of MLA declares all layouts, but writes and gathers a layer as one run of bytes.
"""

import importlib.abc
import importlib.util
import sys


def _declare(module):
    from vllm.v1.kv_cache_layout import KVCacheLayout

    layouts = (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)
    module.CPUAttentionBackend.supported_kv_cache_layouts = classmethod(lambda cls: layouts)


def _write_by_blocks(module):
    def do_kv_cache_update(self, kv_c_normed, k_pe, kv_cache, slot_mapping, *_):
        if not kv_cache.numel():
            return
        slots = slot_mapping.flatten()
        is_token = slots >= 0
        blocks, positions = slots[is_token] // kv_cache.shape[1], slots[is_token] % kv_cache.shape[1]
        values = module.torch.cat([kv_c_normed, k_pe.squeeze(1)], dim=-1)
        kv_cache[blocks, positions] = values[is_token].to(kv_cache.dtype)

    module.CPUMLAImpl.do_kv_cache_update = do_kv_cache_update


def _gather_by_blocks(module):
    gather = module.gather_mla_context_cache_cpu
    module.gather_mla_context_cache_cpu = lambda *, src_cache, **rest: gather(src_cache=src_cache.contiguous(), **rest)


_PATCHES = {
    "vllm._custom_ops": _gather_by_blocks,
    "vllm.v1.attention.backends.cpu_attn": _declare,
    "vllm.v1.attention.backends.mla.cpu_mla": _write_by_blocks,
}


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        patch = _PATCHES.pop(fullname, None)
        if patch is None:
            return None
        spec = importlib.util.find_spec(fullname)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            patch(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder())
