"""A conversation over two prefill workers that share a store: every turn computes only what is new, on either worker.

    python examples/shared_store_chat.py

Starts a store, a router, two prefill workers and a decode worker as processes of this machine, on free ports. After the first
turn the prefill worker that has computed it is killed, so that the second turn lands on one that has never seen the
conversation. docs/tiers.md says what happens inside.
"""

from __future__ import annotations

import time
from typing import Any

from openai import OpenAI

from core.config import load_config
from kvferry import LocalCluster

MODEL = "smollm2-135m"
RULES = (
    "You are the travel desk of a shipping line in the north. Answer in plain English, in three sentences at most. "
    "Name what you are sure of and say so when you are not. Never promise a cabin, a meal or a departure. "
    "Distances are in nautical miles, prices in euros, and times are local. If somebody asks for medical or legal "
    "advice, point to the ship's doctor or to the office ashore. Passengers may be nervous: be kind, and do not tell "
    "stories of storms."
)
QUESTIONS = (
    "I plan a trip to Norway by ship in June. Tell me in a few sentences what I should pack, and why.",
    "And what would you leave at home?",
    "Which of these things is the most important?",
)
SETTINGS = (
    f"model.name={MODEL}",
    "router.port=0",
    f"cache.memory_bytes={256 << 20}",
    "connector.name=multi",
    "connector.connectors=[p2p,store]",  # handoff from prefill to decode first, then the store
    "local.num_prefill=2",
    "local.kvstore=true",
    f"kvstore.memory_bytes={256 << 20}",
)


def main() -> None:
    """Ask three questions, each with all that was said before."""
    with LocalCluster(load_config(assignments=SETTINGS)) as cluster:
        client = OpenAI(base_url=f"{cluster.base_url}/v1", api_key="not needed")
        messages = [{"role": "system", "content": RULES}]
        for turn, question in enumerate(QUESTIONS, start=1):
            idle = {worker.engine_id for worker in cluster.workers_of("prefill")}
            before = {name: num_looked_up(cluster, name) for name in idle}
            messages.append({"role": "user", "content": question})
            answer: Any = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=60, temperature=0)  # type: ignore[arg-type]
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
            (landed,) = (name for name in idle if num_looked_up(cluster, name) > before[name])
            usage = answer.usage
            cached = usage.prompt_tokens_details.cached_tokens
            print(f"turn {turn} on {landed}: {usage.prompt_tokens} tokens, {usage.prompt_tokens - cached} computed")
            time.sleep(1)  # the answer's own blocks reach the store a moment after it
            if turn == 1:
                cluster.kill(landed)
                while landed in cluster.pids:
                    time.sleep(0.05)


def num_looked_up(cluster: LocalCluster, name: str) -> float:
    """Return how many prompt tokens a worker has looked up in its prefix cache."""
    lines = cluster.metrics(name).splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("kvferry_prefix_cache_queries_total"))


if __name__ == "__main__":
    main()
