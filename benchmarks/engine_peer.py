"""vLLM's engine on the CPU: the part of ``benchmarks/engine.py --peers`` that runs in vLLM's environment.

    python benchmarks/engine_peer.py MODEL_FOLDER DTYPE

Makes an eager engine in this process, of as many threads as ``OMP_NUM_THREADS`` says. Reads lines of JSON, ``{"prompts": token
ids of each prompt, "num_tokens": of each answer}``, and answers each by one: ``times``, when it began and when each step ended,
in seconds, ``tokens`` of each answer, and ``add_us``, the microseconds of adding each request. Imports nothing of kvferry.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

MAX_MODEL_LEN = 2048
MAX_NUM_SEQS = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="of the model")
    parser.add_argument("dtype", help="of weights and KV")
    arguments = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints
    from vllm import LLM  # type: ignore[import-not-found]

    llm = LLM(
        model=arguments.folder,
        dtype=arguments.dtype,
        skip_tokenizer_init=True,
        enforce_eager=True,
        distributed_executor_backend="uni",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
    )
    for number, line in enumerate(sys.stdin):
        asked = json.loads(line)
        print(json.dumps(run(llm.llm_engine, f"q{number}", asked["prompts"], asked["num_tokens"])), file=answers, flush=True)


def run(engine: Any, name: str, prompts: list[list[int]], num_tokens: int) -> dict[str, Any]:  # noqa: ANN401
    """Add all prompts, then step until all are answered."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    tokens: dict[str, list[int]] = {f"{name}-{number}": [] for number in range(len(prompts))}
    times, add_us = [time.perf_counter()], []
    for request_id, prompt in zip(tokens, prompts, strict=True):
        begin = time.perf_counter()
        engine.add_request(request_id, {"prompt_token_ids": prompt}, sampling)
        add_us.append(1e6 * (time.perf_counter() - begin))
    while engine.has_unfinished_requests():
        outputs = engine.step()
        times.append(time.perf_counter())
        for output in outputs:
            tokens[output.request_id] = list(output.outputs[0].token_ids)
    return {"times": times, "tokens": list(tokens.values()), "add_us": add_us}


if __name__ == "__main__":
    main()
