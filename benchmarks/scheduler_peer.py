"""vLLM's ``add_request``, hashing included: the part of ``benchmarks/scheduler.py --peer`` that runs in vLLM's environment.

    python benchmarks/scheduler_peer.py MODEL_FOLDER NUM_REQUESTS BLOCK_SIZE

Makes an engine with random weights, prefix caching and the default hash. Reads lines of JSON, a list of prompts as token ids,
and answers each by one: ``scheduler``, the microseconds of making each ``Request``, which computes the block hashes, and adding
it to the scheduler; ``engine``, those of the engine's ``add_request``, which checks and copies the request first. Imports
nothing of kvferry.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable

MAX_MODEL_LEN = 2048
KERNEL_BLOCK_SIZE = 32  # the least that its attention on the CPU takes; hashes are made for the given size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="of the model")
    parser.add_argument("num_requests", type=int, help="prompts of a line, at most")
    parser.add_argument("block_size", type=int, help="tokens of a hash")
    arguments = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]
    from vllm.utils.hashing import get_hash_fn_by_name  # type: ignore[import-not-found]
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher  # type: ignore[import-not-found]
    from vllm.v1.request import Request  # type: ignore[import-not-found]

    llm = LLM(
        model=arguments.folder,
        dtype="float32",
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        distributed_executor_backend="uni",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=arguments.num_requests,
        block_size=KERNEL_BLOCK_SIZE,
        enable_prefix_caching=True,
    )
    engine = llm.llm_engine
    core = engine.engine_core.engine_core
    hash_function = get_hash_fn_by_name(core.vllm_config.cache_config.prefix_caching_hash_algo)
    core.request_block_hasher = get_request_block_hasher(arguments.block_size, hash_function)
    sampling = SamplingParams(max_tokens=200, detokenize=False)
    for number, line in enumerate(sys.stdin):
        prompts = json.loads(line)
        names = [f"q{number}-{index}" for index in range(len(prompts))]

        def add_to_engine(name: str, prompt: list[int]) -> None:
            engine.add_request(name, {"prompt_token_ids": prompt}, sampling)

        def add_to_scheduler(name: str, prompt: list[int]) -> None:
            request = Request(name, prompt, sampling, None, block_hasher=core.request_block_hasher)
            core.scheduler.add_request(request)

        found = {}
        for kind, add in (("engine", add_to_engine), ("scheduler", add_to_scheduler)):
            found[kind] = [microseconds(add, f"{kind}-{name}", prompt) for name, prompt in zip(names, prompts, strict=True)]
        engine.abort_request([f"engine-{name}" for name in names])
        core.abort_requests([f"scheduler-{name}" for name in names])
        print(json.dumps(found), file=answers, flush=True)


def microseconds(add: Callable[[str, list[int]], None], name: str, prompt: list[int]) -> float:
    """Add a request and return how long it took."""
    begin = time.perf_counter()
    add(name, prompt)
    return 1e6 * (time.perf_counter() - begin)


if __name__ == "__main__":
    main()
