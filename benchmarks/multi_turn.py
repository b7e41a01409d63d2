"""What a prefill worker computes in each turn of a conversation, with the decode worker's blocks as the source and without.

    python benchmarks/multi_turn.py [--turns 8] [--answer-tokens 256] [--quick] [--json FILE] [--markdown]

One prefill and one decode worker with the real model, as processes, driven by chats with temperature 0. The next prompt repeats
the conversation as text, so its tokens may differ from those that the decode worker has generated: the hit ends there.

Goals: from turn 2 on the prefill worker computes at most the tokens after the first difference, and one block; the answers are
the same tokens as without sources.
"""

from __future__ import annotations

import re
import sys
import time
from dataclasses import dataclass

import httpx
from common import Machine, Outcome, Table, at_least, at_most, goal_notes, make_parser, publish

from core.config import load_config
from kvferry.local import LocalCluster

BLOCK_SIZE = 64
REPORT_S = 1.0  # until the router knows what the last turn has left
QUESTIONS = (
    "Describe a harbour at dawn, with its boats and the people who work there.",
    "Now tell me about one of these boats: who built it, and what it carries.",
    "What does its crew eat, and who cooks?",
    "A storm comes up. What do they do first?",
    "One of them writes a letter home. What is in it?",
    "They reach an island. Describe the village.",
    "What do the villagers ask of them?",
    "How does the story end?",
)


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn: token counts, the time to the first token as the router measures it, and the answer."""

    num_prompt: int
    num_held: int  # leading tokens that prompt and decode worker have in common
    num_computed: int
    num_pulled: int
    ttft_ms: float
    answer: tuple[int, ...]

    @property
    def num_different(self) -> int:
        return self.num_prompt - self.num_held


def hold_conversation(model: str, num_turns: int, num_answer: int, *, has_sources: bool) -> tuple[list[Turn], dict[str, int]]:
    """Return the turns, and the prefill worker's questions by outcome."""
    settings = [
        f"connector.peer_prefixes={str(has_sources).lower()}",
        f"model.name={model}",
        f"cache.block_size={BLOCK_SIZE}",
        "router.port=0",
        "cache.memory_bytes=512MiB",
    ]
    turns: list[Turn] = []
    held: list[int] = []
    messages: list[dict[str, str]] = []
    with LocalCluster(load_config(None, settings)) as cluster, httpx.Client(base_url=cluster.base_url, timeout=600) as client:
        for number in range(num_turns):
            messages.append({"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]})
            body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": num_answer, "ignore_eos": True}
            response = client.post("/v1/chat/completions", json=body | {"return_token_ids": True})
            response.raise_for_status()
            answer = response.json()
            choice, usage = answer["choices"][0], answer["usage"]
            prompt = answer["prompt_token_ids"]
            pairs = enumerate(zip(prompt, held, strict=False))
            same = next((index for index, (ours, theirs) in pairs if ours != theirs), min(len(prompt), len(held)))
            routing = usage["kv_transfer"]["routing"][0]
            turns.append(
                Turn(
                    num_prompt=len(prompt),
                    num_held=same,
                    num_computed=len(prompt) - usage["prompt_tokens_details"]["cached_tokens"],
                    num_pulled=routing.get("pulled_tokens", 0),
                    ttft_ms=usage["kv_transfer"]["timing"]["first_token"]["total_ms"],
                    answer=tuple(choice["token_ids"]),
                )
            )
            held = [*prompt, *choice["token_ids"][:-1]]  # the last token has no KV
            messages.append({"role": "assistant", "content": choice["message"]["content"]})
            time.sleep(REPORT_S)
        found = re.findall(r'kv_prefix_pulls_total\{outcome="(\w+)"\} (\d+)', cluster.metrics("prefill-0"))
    return turns, {outcome: int(count) for outcome, count in found if int(count)}


def _row(number: int, one: Turn, other: Turn) -> list[str]:
    counts = (number, one.num_prompt, one.num_different, one.num_pulled, one.num_computed, other.num_computed)
    return [*(f"{count:,}" for count in counts), f"{one.ttft_ms:,.0f}", f"{other.ttft_ms:,.0f}"]


def main() -> int:
    parser = make_parser(__doc__ or "", 1)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--answer-tokens", type=int, default=256)
    arguments = parser.parse_args()
    num_turns, num_answer = (3, 16) if arguments.quick else (arguments.turns, arguments.answer_tokens)
    machine = Machine.now()
    pulled, outcomes = hold_conversation(arguments.model, num_turns, num_answer, has_sources=True)
    alone, _ = hold_conversation(arguments.model, num_turns, num_answer, has_sources=False)
    rows = [_row(number, *both) for number, both in enumerate(zip(pulled, alone, strict=True), 1)]
    columns = ["turn", "prompt", "after the difference", "loaded", "computed", "without", "TTFT ms", "without"]
    later = pulled[1:]
    beyond = [turn.num_computed - turn.num_different for turn in later]
    num_same = sum(one.answer == other.answer for one, other in zip(pulled, alone, strict=True))
    goals = [
        at_most(
            "computed beyond what follows the first difference, from turn 2 on", max(beyond, default=None), BLOCK_SIZE, "tokens"
        ),
        at_least("answers of the same tokens as without sources", num_same, num_turns, "answers"),
    ]
    num_answers = sum(len(turn.answer) for turn in pulled[:-1])
    ends = [before.num_prompt + len(before.answer) - 1 for before in pulled[:-1]]  # of what the decode worker held
    num_lost = sum(max(0, end - after.num_held) for end, after in zip(ends, later, strict=True))
    notes = [
        *goal_notes(goals),
        f"questions to the decode worker: {', '.join(f'{count} {name}' for name, count in outcomes.items()) or 'none'}",
        f"of {num_answers} answer tokens {num_lost} came after the first difference in the next prompt",
    ]
    publish(Outcome([Table(columns, rows)], notes, {"rows": rows, "questions": outcomes}, goals), machine, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
