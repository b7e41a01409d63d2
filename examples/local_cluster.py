"""A whole cluster in a with-block, asked by the openai client: stream an answer, then see what its handoff cost.

    python examples/local_cluster.py [QUESTION]

Starts a router, a prefill and a decode worker as processes of this machine, on free ports; the end of the block ends them.
"""

from __future__ import annotations

import sys

from openai import OpenAI

from core.config import load_config
from kvferry import LocalCluster

MODEL = "smollm2-135m"


def main() -> None:
    """Ask one question."""
    question = " ".join(sys.argv[1:]) or "What is the capital of France?"
    config = load_config(assignments=[f"model.name={MODEL}", "router.port=0", f"cache.memory_bytes={256 << 20}"])
    with LocalCluster(config) as cluster:
        client = OpenAI(base_url=f"{cluster.base_url}/v1", api_key="not needed")
        stream = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": question}],
            max_tokens=48,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        usage = None
        for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                print(choice.delta.content or "", end="", flush=True)
    # The client keeps fields that it does not know: how the KV cache went from the prefill to the decode worker.
    print("\n", usage.model_dump()["kv_transfer"] if usage else "")


if __name__ == "__main__":
    main()
