"""Lets vLLM's CPU backend use the layout BLHNC, in every process that has this folder in its PYTHONPATH.

The backend declares LBHNC only, but computes the same tokens with BLHNC, which backends for GPUs support by themselves.
"""

import importlib.abc
import importlib.util
import sys

_MODULE = "vllm.v1.attention.backends.cpu_attn"


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            from vllm.v1.kv_cache_layout import KVCacheLayout

            layouts = (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)
            module.CPUAttentionBackend.supported_kv_cache_layouts = classmethod(lambda cls: layouts)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder())
