"""The engine by hand, without processes, HTTP or connectors: add a request, step until nothing is left to do.

    python examples/aggregated_engine.py [TEXT]

This is all that a worker's engine thread does; scheduling, paged KV cache and prefix caching are inside ``step``.
"""

from __future__ import annotations

import sys

from core.clock import SystemClock
from core.config import load_config
from core.engine.build import apply_cpu_threads, build_engine
from core.model.detokenizer import IncrementalDetokenizer
from core.model.tokenizer import Tokenizer
from core.request import NewRequest
from core.wire.sampling import SamplingParams


def main() -> None:
    """Continue one text."""
    text = " ".join(sys.argv[1:]) or "The three primary colours are"
    config = load_config(assignments=["model.name=smollm2-135m", f"cache.memory_bytes={256 << 20}", "worker.cpu_threads=1"])
    apply_cpu_threads(config.worker)
    built = build_engine(config, SystemClock())
    tokenizer = Tokenizer(built.files)
    prompt = tokenizer.encode(text)
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    sampling = SamplingParams(max_tokens=32, temperature=0.0)
    request = NewRequest(request_id="a", prompt_token_ids=prompt, sampling=sampling, stop_token_ids=built.eos_token_ids)
    print(text, end="")
    built.engine.add_request(request)
    while built.engine.has_work():
        for output in built.engine.step():
            print(detokenizer.push(output.new_token_ids), end="", flush=True)
    print(detokenizer.flush())
    built.engine.shutdown()


if __name__ == "__main__":
    main()
