"""A vLLM engine in a process of its own, driven by lines of JSON: the program, which runs in vLLM's environment.

Started as ``python engine_process.py ARGUMENTS``, where the only argument is JSON: the keyword arguments of ``LLM``. It reads
one command per line and answers each by one line. Between commands it steps while the engine has work, as a server does.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable


class EngineProcess:
    """The engine and its open requests."""

    def __init__(self, arguments: dict, answer: Callable[[object], None]) -> None:
        from vllm import LLM

        self._answer = answer
        defaults = {"skip_tokenizer_init": True, "enforce_eager": True, "distributed_executor_backend": "uni"}
        self._llm = LLM(**defaults | arguments)
        self._engine = self._llm.llm_engine
        self.core = self._engine.engine_core.engine_core
        self.connector = self.core.scheduler.connector
        self._results: dict[str, dict] = {}
        self._times: dict[str, list[float]] = {}  # of arrival and of each token
        self._violations: list[str] = []
        self._adapters: dict[str, int] = {}  # numbers of LoRA adapters, by name in order of their first use
        self._num_scheduled_tokens = 0
        self._count_tokens()
        if hasattr(self.connector, "scheduler_side") and arguments.get("tensor_parallel_size", 1) == 1:
            self._watch_blocks()  # the only rank is in this process

    def _count_tokens(self) -> None:
        """Count the tokens that are computed."""
        schedule = self.core.scheduler.schedule

        def counting(*arguments, **options):
            output = schedule(*arguments, **options)
            self._num_scheduled_tokens += output.total_num_scheduled_tokens
            return output

        self.core.scheduler.schedule = counting

    def _watch_blocks(self) -> None:
        """Note each block that is handed out while a published handoff names it under a valid seal."""
        pool = self.core.scheduler.kv_cache_manager.block_pool
        real = pool.get_new_blocks

        def get_new_blocks(num_blocks: int):
            blocks = real(num_blocks)
            named, seals = _published_generations(self.connector.scheduler_side.producer), _rank_and_side()[1].pool.seals
            for block in blocks:
                if named.get(block.block_id) == seals.sealed_generation(block.block_id):
                    self._violations.append(f"block {block.block_id} was handed out under a valid seal")
            return blocks

        pool.get_new_blocks = get_new_blocks

    def serve(self) -> None:
        """Carry out commands until the input ends."""
        commands: queue.Queue[dict | None] = queue.Queue()
        threading.Thread(target=_read, args=(commands,), daemon=True).start()
        while True:
            has_work = self.core.scheduler.has_requests()
            try:
                command = commands.get(block=not has_work, timeout=None)
            except queue.Empty:
                self._step()
                continue
            if command is None:
                return
            self._answer(getattr(self, command.pop("op"))(**command))

    def _step(self) -> None:
        for output in self._engine.step():
            times = self._times[output.request_id]
            times += [time.monotonic()] * (len(output.outputs[0].token_ids) - len(times) + 1)
            if output.finished:
                self._keep(output)
        if not self.core.scheduler.get_request_counts()[0]:
            time.sleep(0.001)  # as the engine core's loop does without tokens to compute

    def _keep(self, output) -> None:
        done = output.outputs[0]
        self._results[output.request_id] = {
            "tokens": list(done.token_ids),
            "finish_reason": done.finish_reason,
            "params": output.kv_transfer_params,
            "num_cached": output.num_cached_tokens,
            "token_s": _since_first(self._times.pop(output.request_id)),
        }

    # ---- commands ----------------------------------------------------------------------------------------------------

    def add(
        self,
        name: str,
        prompt: list[int],
        max_tokens: int,
        params: dict | None = None,
        lora: tuple[str, str] | None = None,
        image: int | None = None,
        **options,
    ) -> None:
        """Begin a request; its result has the seconds from here to each token.

        ``lora`` is an adapter's name and folder, ``image`` the seed of the image for the placeholder in the prompt.
        """
        from vllm import SamplingParams

        extra = {"kv_transfer_params": params} if params is not None else None
        salt = options.pop("cache_salt", None)
        sampling = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, extra_args=extra, **options
        )
        given = {"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {})
        if image is not None:
            given["multi_modal_data"] = {"image": _image(image)}
        self._times[name] = [time.monotonic()]
        self._engine.add_request(name, given, sampling, lora_request=self._adapter(*lora) if lora else None)

    def _adapter(self, name: str, folder: str):
        from vllm.lora.request import LoRARequest

        return LoRARequest(name, self._adapters.setdefault(name, len(self._adapters) + 1), folder)

    def add_and_step(self, count: int, **request) -> None:
        """Begin a request and make so many steps, with nothing in between."""
        self.add(**request)
        self.step(count)

    def add_step_and_preempt(self, name: str, count: int, **request) -> bool:
        """Begin a request, make so many steps, and preempt it if it is still running."""
        self.add(name, **request)
        self.step(count)
        return self.preempt(name)

    def reject(self, name: str, params: dict) -> None:
        """Do as vLLM's server does when it refuses a request that names a handoff."""
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params})
        fields = {"request_id": name, "prompt_token_ids": [0], "sampling_params": sampling, "abort_immediately": True}
        known = EngineCoreRequest.__struct_fields__
        rest = {field: None for field in known if field not in fields and field not in _defaults(EngineCoreRequest)}
        request, wave = self.core.preprocess_add_request(EngineCoreRequest(**fields, **rest | {"arrival_time": time.time()}))
        self.core.add_request(request, wave)

    def result(self, name: str, timeout_s: float = 60.0) -> dict:
        """Step until a request has ended."""
        end = time.monotonic() + timeout_s
        while name not in self._results:
            if time.monotonic() > end:
                return {"error": f"{name} has not ended after {timeout_s} s"}
            self._step()
        return self._results.pop(name)

    def abort(self, name: str) -> None:
        """End a request early."""
        self._engine.abort_request([name], internal=False)

    def pause(self, mode: str) -> None:
        """Pause the scheduler in one of vLLM's modes: with ``keep``, requests stay as they are."""
        self.core.pause_scheduler(mode, clear_cache=False)

    def resume(self) -> None:
        """Go on after a pause."""
        self.core.resume_scheduler()

    def reset_all_caches(self) -> bool:
        """Do what vLLM does after it has replaced the weights."""
        return self._engine.reset_prefix_cache(reset_connector=True)

    def reset_prefix_cache(self) -> bool:
        """Forget what earlier prompts have left."""
        return self.core.scheduler.reset_prefix_cache()

    def step(self, count: int = 1) -> None:
        """Make steps, whether there is work or not."""
        for _ in range(count):
            self._step()

    def counts(self) -> dict:
        """Return what the loads of this engine have brought so far, the sum of all ranks."""
        found = {"loads": 0, "verified": 0, "failures": Counter()}
        for loads, verified, failures in self._llm.collective_rpc(_counts_of_rank):
            found["loads"] += loads
            found["verified"] += verified
            found["failures"].update(failures)
        return found | {"failures": dict(found["failures"])}

    def flip_bit(self, block_id: int, rank: int = 0) -> None:
        """Change one bit of a block's bytes on one rank."""
        self._llm.collective_rpc(_flip_bit, args=(block_id, rank))

    def seal_as(self, block_id: int, generation: int, rank: int = 0) -> None:
        """Give a block another seal on one rank, as if it had been reused for another prompt."""
        self._llm.collective_rpc(_seal_as, args=(block_id, generation, rank))

    def preempt(self, name: str) -> bool:
        """Preempt a request if it is running, as a lack of blocks would."""
        scheduler = self.core.scheduler
        for request in list(scheduler.running):
            if request.request_id.startswith(name):
                scheduler.running.remove(request)
                scheduler._preempt_request(request, time.monotonic())
                return True
        return False

    def keep_reads(self, count: int) -> None:
        """Keep the next reads of blocks until they are let go (``tests.vllm.late_reads``)."""
        _late_reads().made[-1].num_to_keep = count

    def num_kept_reads(self) -> int:
        """Return how many reads are kept."""
        return _late_reads().made[-1].num_kept

    def let_reads_go(self) -> None:
        """Post the reads that are kept."""
        _late_reads().made[-1].let_go()

    def delay_seals(self, seconds: float) -> None:
        """Seal so long after a step (``tests.vllm.late_seals``)."""
        _late_seals().delay_s = seconds

    def usage(self) -> dict:
        """Return what is held: blocks in use, requests, and what the connector holds."""
        pool = self.core.scheduler.kv_cache_manager.block_pool
        side = self.connector.scheduler_side if hasattr(self.connector, "scheduler_side") else None
        held = (
            {}
            if side is None
            else {
                "published": len(side.producer._published),
                "sealed": side.producer.num_held_blocks,
                "held_by_ranks": sum(self._llm.collective_rpc(_held_by_rank)),
                "loading": side.consumer.num_loading,
                "quarantined": side.num_quarantined_blocks,
                "refused": dict(side.consumer.refused),
            }
        )
        return {
            "violations": self._violations,
            "scheduled_tokens": self._num_scheduled_tokens,
            "used_blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
            "requests": len(self.core.scheduler.requests),
            **held,
        }


def _late_reads():
    from tests.vllm import late_reads  # it imports our packages, which an engine with the wheel alone does not have

    return late_reads


def _late_seals():
    from tests.vllm import late_seals

    return late_seals


def _rank_and_side() -> tuple:
    from vllm.distributed.kv_transfer import get_kv_transfer_group
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return get_tensor_model_parallel_rank(), get_kv_transfer_group().worker_side


def _published_generations(producer) -> dict[int, int]:
    """Return the blocks that published handoffs name, with their generations."""
    named = {block_id for ordered in producer._published.values() for block_id in ordered.block_ids()}
    return {block_id: producer._sealed[block_id].seal.generation for block_id in named}


def _counts_of_rank(worker) -> tuple[int, int, dict[str, int]]:
    _, side = _rank_and_side()
    return side.totals.loads, side.totals.verified_blocks, dict(side.totals.failures)


def _held_by_rank(worker) -> int:
    return _rank_and_side()[1].num_held_blocks()


def _flip_bit(worker, block_id: int, chosen: int) -> None:
    rank, side = _rank_and_side()
    if rank == chosen:
        num_planes = side.pool.layout.num_planes
        plane_bytes = side.pool.block_bytes // num_planes
        row = num_planes // 2 * side.pool.num_blocks + block_id
        side.pool.buffer[row * plane_bytes + plane_bytes // 2] ^= 1


def _seal_as(worker, block_id: int, generation: int, chosen: int) -> None:
    from core.kv.seals import ExpectedSeal

    rank, side = _rank_and_side()
    if rank == chosen:
        side.pool.seals.seal(block_id, ExpectedSeal(generation, 0, b"another prompt..", 32))


def _image(seed: int):
    from io import BytesIO

    from PIL import Image

    from tests.support.tiny_smolvlm import encode_test_image

    return Image.open(BytesIO(encode_test_image(seed)))


def _defaults(struct) -> set[str]:
    import msgspec

    return {field.name for field in msgspec.structs.fields(struct) if not field.required}


def _since_first(times: list[float]) -> list[float]:
    return [each - times[0] for each in times[1:]]


def _read(commands: queue.Queue) -> None:
    for line in sys.stdin:
        commands.put(json.loads(line))
    commands.put(None)


def main() -> None:
    out = os.fdopen(os.dup(1), "w")  # vLLM writes to standard output, too
    os.dup2(2, 1)

    def answer(value: object) -> None:
        out.write(json.dumps(value) + "\n")
        out.flush()

    for variable, module in (("LATE_READS", _late_reads), ("LATE_SEALS", _late_seals)):
        if variable in os.environ:
            module().install()
    process = EngineProcess(json.loads(sys.argv[1]), answer)
    answer("ready")
    process.serve()
    os._exit(0)  # an in-process engine does not end by itself


if __name__ == "__main__":
    main()
