"""Images beside text: what text requests lose while an image's embeddings are on their way, and what an image costs twice.

    python benchmarks/encoder.py [--model FOLDER] [--delay 2.0] [--repeats 15] [--json FILE] [--markdown] [--quick]

Without ``--model``, a folder of an Idefics 3 or SmolVLM checkpoint, the model is a small random one, whose steps are so short
that the scheduler's other work weighs most.

*In the engine*: text requests generate side by side in one engine, in this process. In every second run an image request comes
whose embeddings are ready after the delay only. What counts are the text tokens within the delay; the ratio is that of two runs
of the same repeat, which of them comes first alternates.
*In a cluster*: the same through a router, an encode, a prefill and a decode worker, each a process, with clients that send one
text request after another. The encode worker is stopped by SIGSTOP when the image request comes, and goes on after the delay.
*Twice*: one image in several prompts of the same cluster, one after another: how often it was embedded, by the encode worker's
own count, and how long the first and the others took from the request to the second token.
Figures are medians (smallest..largest).
"""

from __future__ import annotations

import argparse
import base64
import itertools
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
from common import Machine, NothingMeasured, Outcome, Spread, Table, at_least, at_most, goal_notes, make_parser, publish
from prometheus_client.parser import text_string_to_metric_families

from core.clock import SystemClock
from core.config import KVFerryConfig, load_config
from core.ec_connector import ECConnectorScheduler, ECConnectorWorker
from core.engine.build import BuiltEngine, build_engine
from core.model.image_file import read_image_size
from core.model.image_prompt import PromptImage, load_image_prompts
from core.model.tokenizer import Tokenizer
from core.request import ECConnectorMetadata, NewRequest
from core.wire.sampling import SamplingParams
from kvferry.local import LocalCluster
from tests.support.tiny_smolvlm import build_tiny_smolvlm, encode_test_image

GOAL = 0.95  # of the throughput without the image request
NUM_TEXTS, TEXT_TOKENS, ANSWER_TOKENS = 8, 48, 512
NUM_CLIENTS, CLIENT_TOKENS = 4, 16
QUICK_DELAY_S, QUICK_CLIENT_TOKENS = 1.0, 2  # of short requests some end within the delay on a loaded machine, too
WARM_UP_S = 0.5
NUM_REPEATED = 8
TIMEOUT_S = 120.0
ENCODE = "encode-0"


class LateEmbeddings(ECConnectorScheduler):
    """Lets requests with images wait until ``ready_at``; then they compute the embeddings themselves."""

    def __init__(self) -> None:
        self.ready_at = 0.0
        self.num_asked = 0

    def has_cache_item(self, identifier: bytes) -> bool:
        return False

    def ensure_cache_available(self, request: object, num_computed_tokens: int) -> bool:
        self.num_asked += 1
        return time.monotonic() >= self.ready_at

    def update_state_after_alloc(self, request: object, index: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: object) -> ECConnectorMetadata:
        return ECConnectorMetadata()


class NoEmbeddings(ECConnectorWorker):
    """The other side: loads and saves nothing."""

    def register_caches(self, layout: object) -> None:
        pass

    def start_load_caches(self, encoder_cache: object, metadata: object) -> None:
        pass

    def save_caches(self, encoder_cache: object, identifier: bytes) -> None:
        pass


class Late:
    """Both sides."""

    def __init__(self) -> None:
        self.scheduler = LateEmbeddings()
        self.worker = NoEmbeddings()


# ---- in the engine -------------------------------------------------------------------------------------------------------


class Engine:
    """An engine with text requests that never end, and an image request now and then.

    ``decodes_beside``: images are decoded on a thread of their own, as in a worker.
    """

    def __init__(self, config: KVFerryConfig, *, decodes_beside: bool = True) -> None:
        self.late = Late()
        built = self._built = build_engine(config, SystemClock(), None, lambda fingerprint: self.late)
        if decodes_beside and built.image_decode_thread is not None:
            built.image_decode_thread.start(built.engine.wake)
        self._longest_step_s = 0.0
        self._tokenizer = Tokenizer(built.files)
        self._numbers = itertools.count()
        self._texts: set[str] = set()

    def close(self) -> None:
        self._built.engine.shutdown()
        self._built.pool.close()

    def count_text_tokens(self, seconds: float, delay_s: float | None) -> int:
        """Return the text tokens within ``seconds``; with a delay, an image request comes at their beginning."""
        self._run_until(time.monotonic() + WARM_UP_S)
        start = time.monotonic()
        if delay_s is not None:
            self.late.scheduler.ready_at = start + delay_s
            self.show(encode_test_image(next(self._numbers)))
        num_tokens = self._run_until(start + seconds)
        self.let_images_end()
        return num_tokens

    def count_and_time(self, seconds: float, image: bytes | None) -> tuple[int, float]:
        """Return the text tokens within ``seconds``, and the longest step; an image request comes at their beginning."""
        self._run_until(time.monotonic() + WARM_UP_S)
        if image is not None:
            self.show(image)
        num_tokens = self._run_until(time.monotonic() + seconds)
        self.let_images_end()
        return num_tokens, self._longest_step_s

    def show(self, image: bytes) -> None:
        """Add a request about an image."""
        self._built.engine.add_request(image_request(self._built, self._tokenizer, next(self._numbers), image))

    def let_images_end(self) -> None:
        """Go on until the next run can begin."""
        while any(not name.startswith("text") for name in self._live()):
            self._built.engine.step()

    def _run_until(self, end: float) -> int:
        num_tokens, self._longest_step_s, last = 0, 0.0, time.monotonic()
        while last < end:
            self._fill_up()
            outputs = self._built.engine.step()
            before, last = last, time.monotonic()
            self._longest_step_s = max(self._longest_step_s, last - before)
            for output in outputs:
                if output.request_id in self._texts:
                    num_tokens += len(output.new_token_ids)
                    if output.finish_reason is not None:
                        self._texts.remove(output.request_id)
        return num_tokens

    def _fill_up(self) -> None:
        while len(self._texts) < NUM_TEXTS:
            number = next(self._numbers)
            name = f"text-{number}"
            prompt = [7 + (number * 31 + place) % 100 for place in range(TEXT_TOKENS)]
            sampling = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
            self._built.engine.add_request(NewRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling))
            self._texts.add(name)

    def _live(self) -> list[str]:
        return list(self._built.engine.scheduler.requests)


def image_request(built: BuiltEngine, tokenizer: Tokenizer, number: int, content: bytes) -> NewRequest:
    """Return a request about an image."""
    prompts = load_image_prompts(built.files, tokenizer)
    assert prompts is not None, "the model reads text only"
    images = [PromptImage(content, read_image_size(content))]
    message = {"role": "user", "content": [{"type": "text", "text": "what is "}, {"type": "image"}]}
    text = tokenizer.apply_chat_template([message], add_generation_prompt=True)
    token_ids = tokenizer.encode(prompts.expand(text, [image.size for image in images]), add_special_tokens=False)
    features, media = prompts.features(token_ids, images, built.model_fingerprint)
    sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    return NewRequest(
        request_id=f"image-{number}", prompt_token_ids=token_ids, sampling=sampling, mm_features=features, media=media
    )


# ---- in a cluster --------------------------------------------------------------------------------------------------------


class Clients:
    """Threads that send one text request after another, and count the tokens of those that have ended."""

    def __init__(self, url: str, tokens_per_request: int) -> None:
        self._url = url
        self._tokens_per_request = tokens_per_request
        self._must_stop = threading.Event()
        self._lock = threading.Lock()
        self.num_tokens = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._send, args=(number,)) for number in range(NUM_CLIENTS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._must_stop.set()
            for thread in threads:
                thread.join()

    def _send(self, number: int) -> None:
        with httpx.Client(base_url=self._url, timeout=TIMEOUT_S) as client:
            for turn in itertools.count():
                if self._must_stop.is_set():
                    return
                body = {"prompt": f"client {number}, turn {turn}: ", "max_tokens": self._tokens_per_request, "ignore_eos": True}
                client.post("/v1/completions", json=body).raise_for_status()
                with self._lock:
                    self.num_tokens += self._tokens_per_request


def count_cluster_tokens(cluster: LocalCluster, clients: Clients, seconds: float, delay_s: float | None, seed: int) -> int:
    """Return the text tokens within ``seconds``, of requests that end in them; with a delay, an image request comes first."""
    with clients.running(), ThreadPoolExecutor(1) as pool:
        time.sleep(WARM_UP_S)
        before, start = clients.num_tokens, time.monotonic()
        answer = None
        if delay_s is not None:
            cluster.kill(ENCODE, signal.SIGSTOP)
            answer = pool.submit(ask_about, cluster.base_url, "what is ", encode_test_image(seed))
        try:
            time.sleep(max(0.0, start + seconds - time.monotonic()))
            num_tokens = clients.num_tokens - before
        finally:
            if delay_s is not None:
                cluster.kill(ENCODE, signal.SIGCONT)
        if answer is not None:
            answer.result()
    return num_tokens


def ask_about(url: str, text: str, image: bytes) -> float:
    """Ask for two tokens about an image; return the seconds that it took."""
    data = "data:image/png;base64," + base64.b64encode(image).decode()
    content = [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": data}}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2, "ignore_eos": True}
    start = time.monotonic()
    httpx.post(f"{url}/v1/chat/completions", json=body, timeout=TIMEOUT_S).raise_for_status()
    return time.monotonic() - start


def num_computed(cluster: LocalCluster) -> int:
    """Return how many images the encode worker has embedded."""
    families = text_string_to_metric_families(cluster.metrics(ENCODE))
    samples = (sample for family in families for sample in family.samples if sample.name == "kvferry_encoder_images_total")
    return int(sum(sample.value for sample in samples if sample.labels["outcome"] == "computed"))


def show_twice(cluster: LocalCluster, repeats: int) -> tuple[list[float], list[float], int]:
    """Return the seconds of the first showing and of later ones of ``repeats`` images, and how often these were embedded."""
    firsts, others, before = [], [], num_computed(cluster)
    for number in range(repeats):
        image = encode_test_image(50_000 + number)
        firsts.append(ask_about(cluster.base_url, f"image {number}, first: ", image))
        others += [ask_about(cluster.base_url, f"image {number}, time {turn}: ", image) for turn in range(NUM_REPEATED)]
    return firsts, others, num_computed(cluster) - before


# ---- the whole -----------------------------------------------------------------------------------------------------------


def compare(repeats: int, count: Callable[[bool, int], int]) -> tuple[list[int], list[int]]:
    """Return the tokens of every repeat without and with the image request; which comes first alternates."""
    without, beside = [], []
    for repeat in range(repeats):
        for is_beside in (bool(repeat % 2), not repeat % 2):
            (beside if is_beside else without).append(count(is_beside, repeat))
    return without, beside


def settings_of(model: Path) -> KVFerryConfig:
    return load_config(
        assignments=[
            f"model.name={model}",
            "model.dtype=float32",
            "router.port=0",
            f"cache.memory_bytes={256 << 20}",
            "worker.cpu_threads=1",
            "worker.pin_cpus=false",
            "local.num_encode=1",
            "router.images.encode_timeout_s=60",
            "router.heartbeat_timeout_s=30",
        ]
    )


def measure(model: Path, arguments: argparse.Namespace) -> Outcome:
    delay_s, repeats = arguments.delay, arguments.repeats
    client_tokens = QUICK_CLIENT_TOKENS if arguments.quick else CLIENT_TOKENS
    config = settings_of(model)
    engine = Engine(config)
    in_engine = compare(repeats, lambda is_beside, _: engine.count_text_tokens(delay_s, delay_s if is_beside else None))
    engine.close()
    with tempfile.TemporaryDirectory() as logs, LocalCluster(config, log_dir=Path(logs)) as cluster:
        ask_about(cluster.base_url, "warm up: ", encode_test_image(1))
        in_cluster = compare(
            repeats,
            lambda is_beside, repeat: count_cluster_tokens(
                cluster, Clients(cluster.base_url, client_tokens), delay_s, delay_s if is_beside else None, 1000 + repeat
            ),
        )
        firsts, others, num_encodes = show_twice(cluster, repeats)
    rows, figures, goals = [], {}, []
    for name, (without, beside) in (("engine", in_engine), ("cluster", in_cluster)):
        ratio = Spread.of_ratios(beside, without)
        verdict = "yes" if ratio.median >= GOAL else "NO"
        rates = [Spread.of([tokens / delay_s for tokens in counted]).show(0) for counted in (without, beside)]
        rows.append([f"in the {name}", *rates, ratio.show(3), verdict])
        figures[name] = {"without": without, "beside": beside}
        goals.append(at_least(f"text tokens beside a late image / alone, in the {name}", ratio.median, GOAL, "ratio"))
    columns = ["text tokens/s", "alone", f"beside an image that is {delay_s:g} s late", "ratio", f"at least {GOAL:g}"]
    shown = repeats * (1 + NUM_REPEATED)
    repeated = Table(
        ["images", "shown", "embedded", "first, ms", "again, ms"],
        [[str(repeats), str(shown), str(num_encodes), Spread.of(firsts).show(0, 1e3), Spread.of(others).show(0, 1e3)]],
    )
    goals.append(at_most(f"encodes of an image shown {1 + NUM_REPEATED} times", num_encodes / repeats, 1, "encodes"))
    figures["repeated"] = {"first_s": firsts, "again_s": others, "num_encodes": num_encodes, "num_images": repeats}
    return Outcome([Table(columns, rows), repeated], goal_notes(goals), figures, goals)


def main() -> int:
    parser = make_parser(__doc__ or "", repeats=15, takes_model=False)
    parser.add_argument("--model", type=Path, help="folder of a checkpoint that sees images (default: a small random one)")
    parser.add_argument("--delay", type=float, default=2.0, help="seconds (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.repeats, arguments.delay = 1, QUICK_DELAY_S
    machine = Machine.now()
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or Path(folder)
        if arguments.model is None:
            build_tiny_smolvlm(model)
        try:
            outcome = measure(model, arguments)
        except NothingMeasured as error:
            parser.exit(1, f"{error}; on this machine a longer --delay is needed\n")
    publish(outcome, machine, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
