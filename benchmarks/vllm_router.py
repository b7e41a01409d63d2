"""What our router and agents cost over two vLLM engines, beside a proxy that makes two plain HTTP calls.

    python benchmarks/vllm_router.py [--repeats 30] [--json FILE] [--markdown] [--quick]

It needs vLLM's environment (``make install-vllm``). One pair of ``vllm serve`` on CPU with a tiny Llama and the plug-in; both
ways hand every prompt off. They take turns, request by request, with prompts of 256 tokens, streamed: answers of 1 token and
of 128. The CPU time is that of our router and both agents together, and that of the proxy (``plain_proxies.py``), which
checks, counts and retries nothing. The time per token is the difference between long and short answers, by token; what the
processes do all the time, such as looks at the servers, is in it, and is measured alone at the end.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from common import Machine, Outcome, Spread, Table, make_parser, publish
from plain_proxies import TWO_CALLS, running

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.routed_servers import RoutedServers
from tests.support.streaming_client import Stream
from tests.support.tiny_models import VOCAB_SIZE
from tests.support.vllm_pair import vllm_pair, write_served_model
from tests.support.vllm_server import MODEL

PROMPT_TOKENS, LONG_TOKENS = 256, 128
IDLE_S = 10.0
OURS, PROXY = "our router and agents", "proxy, two plain calls"


@dataclass
class Way:
    """One way to both engines. Per length of the answer: CPU seconds of its processes, and the client's times, by request."""

    name: str
    base_url: str
    pids: Callable[[], Sequence[int]]
    cpu_s: dict[int, list[float]] = field(default_factory=dict)
    first_s: dict[int, list[float]] = field(default_factory=dict)
    total_s: dict[int, list[float]] = field(default_factory=dict)
    idle_share: float = 0.0  # of one core, without requests

    def measure_idle(self) -> None:
        """Keep what the processes cost while they have nothing to do: heartbeats, and looks at the servers."""
        before = self._cpu_s()
        time.sleep(IDLE_S)
        self.idle_share = (self._cpu_s() - before) / IDLE_S

    def measure(self, prompt: list[int], num_tokens: int) -> None:
        """Serve one request, and keep what it cost."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        before = self._cpu_s()
        stream = Stream(self.base_url, body | {"stream": True, "return_token_ids": True}).result()
        assert len(stream.token_ids) == num_tokens, stream.error or stream.broken
        self.cpu_s.setdefault(num_tokens, []).append(self._cpu_s() - before)
        self.first_s.setdefault(num_tokens, []).append(stream.times[0] - stream.started_at)
        self.total_s.setdefault(num_tokens, []).append(stream.ended_at - stream.started_at)

    def _cpu_s(self) -> float:
        """Return the CPU time so far by the scheduler's own count: that of psutil goes on in steps of 10 ms."""
        counts = [path for pid in self.pids() for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
        return sum(int(path.read_text().split()[0]) for path in counts) / 1e9


def benchmark(repeats: int, long_tokens: int) -> Outcome:
    """Measure both ways."""
    words = random.Random(3)
    with TemporaryDirectory() as name:
        folder = Path(name)
        model = write_served_model(folder / "model")
        settings = {"kvferry.transports": ["tcp"], "kvferry.lease_s": 6.0, "kvferry.lease_renew_interval_s": 2.0}
        with vllm_pair(folder, model, settings) as (p, d):
            roles = {"p0": (p, "prefill"), "d0": (d, "decode")}
            logs = folder / "routed"
            logs.mkdir()
            with RoutedServers(logs, model, roles) as routed, running(TWO_CALLS, p.base_url, d.base_url) as (url, pid):
                ways = [Way(OURS, routed.base_url, lambda: routed.pids), Way(PROXY, url, lambda: [pid])]
                for number in range(repeats + 1):
                    for num_tokens in (1, long_tokens):
                        for way in ways if number % 2 else reversed(ways):
                            way.measure([words.randrange(5, VOCAB_SIZE) for _ in range(PROMPT_TOKENS)], num_tokens)
                for way in ways:
                    way.measure_idle()
    return outcome(ways, long_tokens)


def outcome(ways: Sequence[Way], long_tokens: int) -> Outcome:
    """Put the table together; the first request of each kind is left out."""
    rows, figures = [], {}
    for way in ways:
        short, long = (way.cpu_s[num_tokens][1:] for num_tokens in (1, long_tokens))
        per_token = [(more - less) / (long_tokens - 1) for less, more in zip(short, long, strict=True)]
        rows.append(
            [
                way.name,
                Spread.of(short).show(1, 1e3),
                Spread.of(per_token).show(0, 1e6),
                f"{100 * way.idle_share:.1f} %",
                Spread.of(way.first_s[long_tokens][1:]).show(0, 1e3),
                Spread.of(way.total_s[long_tokens][1:]).show(0, 1e3),
            ]
        )
        figures[way.name] = {"idle_share": way.idle_share, "cpu_s": way.cpu_s, "first_s": way.first_s, "total_s": way.total_s}
    columns = [
        "",
        "CPU per request, ms",
        "CPU per token, µs",
        "of a core when idle",
        "to first token, ms",
        f"{long_tokens} tokens, ms",
    ]
    return Outcome([Table(columns, rows)], figures={"ways": figures})


def main() -> None:
    arguments = make_parser(__doc__, 30, takes_model=False).parse_args()
    machine = Machine.now()
    publish(benchmark(2, 16) if arguments.quick else benchmark(arguments.repeats, LONG_TOKENS), machine, arguments)


if __name__ == "__main__":
    main()
