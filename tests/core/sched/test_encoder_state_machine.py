"""Random histories of requests with images, with waits, losses, aborts and preemptions: each token that comes out is right.

Scheduler, caches and HashModel are real; the EC connector is scripted. Pools, budgets and the encoder cache are tiny, so that
images are cut off, evicted, taken up again and computed anew all the time.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from core.request import Request, RequestStatus
from core.testing.hash_encoder import BAD_IMAGE, Image
from kvferry.sim.manual_images import PIXEL_BYTES

IMAGES = [Image(b"image %d" % number, 1 + number % 5, row=number % 3) for number in range(6)]
BAD = Image(BAD_IMAGE, 3)
parts = st.lists(st.one_of(st.integers(1, 7), st.sampled_from([*IMAGES, BAD])), min_size=1, max_size=4)


class ImageMachine(RuleBasedStateMachine):
    make_world: staticmethod

    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[str, Request] = {}
        self.may_fail: set[str] = set()

    @initialize(
        num_blocks=st.integers(10, 16),
        max_num_batched_tokens=st.sampled_from([3, 8, 64]),
        max_num_seqs=st.integers(1, 5),
        policy=st.sampled_from(["fcfs", "priority"]),
        long_prefill_token_threshold=st.sampled_from([0, 0, 5]),
        enable_caching=st.booleans(),
        encoder_cache_size=st.sampled_from([5, 8, 20]),
        max_embeds_per_step=st.sampled_from([5, 7, 20]),
        async_scheduling=st.booleans(),
        image_budget=st.sampled_from([None, 5, 12]),
    )
    def build(self, **config):
        self.world = self.make_world(block_size=4, hash_block_size=4, max_model_len=40, with_ec_connector=True, **config)

    # ---- what may happen

    @rule(
        parts=parts,
        text=st.sampled_from(["one", "other"]),
        max_tokens=st.integers(1, 9),
        has_images=st.booleans(),
        priority=st.integers(0, 2),
    )
    def add(self, *, parts, text, max_tokens, has_images, priority):  # fmt: skip
        request_id = f"r{len(self.requests)}"
        images = [part for part in parts if isinstance(part, Image)]
        if sum(part if isinstance(part, int) else len(part.token_ids) for part in parts) > 28:
            return
        more = {} if has_images else {"media": ()}
        if BAD in images or (images and not has_images):
            self.may_fail.add(request_id)
        self.requests[request_id] = self.world.add_with_images(
            request_id, parts, max_tokens, text=text, priority=priority, arrival_time=float(len(self.requests)), **more
        )

    @rule(image=st.sampled_from(IMAGES), what=st.sampled_from(["fetch", "arrive", "arrive", "lose", "forget"]))
    def move_embeddings(self, image, what):
        script = self.world.ec
        script.on_the_way.discard(image.identifier)
        if what == "fetch":
            script.on_the_way.add(image.identifier)
        elif what in {"arrive", "lose"}:
            script.here[image.identifier] = image.media
            (script.lost.add if what == "lose" else script.lost.discard)(image.identifier)
        else:
            script.here.pop(image.identifier, None)

    @rule(image=st.sampled_from(IMAGES))
    def lose_entry(self, image):
        """The worker loses an entry that it ought to have."""
        self.world.encoder.cache.pop(image.identifier, None)

    @precondition(lambda self: self.world.images is not None)
    @rule(count=st.integers(1, 3))
    def prepare_images(self, count):
        for _ in range(count):
            self.world.images.work()

    @rule(data=st.data())
    def abort(self, data):
        alive = [name for name, request in self.requests.items() if not request.status.is_finished]
        if alive:
            name = data.draw(st.sampled_from(alive))
            assert self.world.abort(name) == [name]

    @rule(count=st.integers(1, 5))
    def step(self, count):
        for _ in range(count):
            self.world.step()
            self.check_step()

    # ---- what must hold

    def check_step(self) -> None:
        world, output = self.world, self.world.last
        scheduled = [(name, index) for name, indices in output.scheduled_encoder_inputs.items() for index in indices]
        identifiers = [self.requests[name].mm_features[index].identifier for name, index in scheduled]
        assert len(identifiers) == len(set(identifiers))
        num_embeds = sum(self.requests[name].mm_features[index].num_embeds for name, index in scheduled)
        assert num_embeds <= world.config.max_embeds_per_step
        for name, num_tokens in output.num_scheduled_tokens.items():
            assert num_tokens > 0, name
        cache = world.scheduler.encoder_cache
        assert not set(cache.holder_ids) - {request.request_id for request in world.scheduler.running}
        assert sum(IMAGE_SIZES[identifier] for identifier in cache.identifiers) <= cache.cache_size

    @invariant()
    def everything_is_right(self):
        if not hasattr(self, "world"):
            return
        self.world.assert_sound()
        if self.world.images is not None:
            assert self.world.images.num_bytes <= PIXEL_BYTES * max(self.world.config.image_budget, *IMAGE_SIZES.values())
        for name, tokens in self.world.tokens.items():
            assert tokens == self.world.expected(self.world.inputs[name], len(tokens)), name
        for name, end in self.world.ends.items():
            assert end != "error" or name in self.may_fail, name

    def teardown(self):
        if not hasattr(self, "world"):
            return
        self.world.ec.on_the_way.clear()
        self.world.run()
        self.everything_is_right()
        for name, request in self.requests.items():
            if request.status is not RequestStatus.FINISHED_ABORTED and name not in self.may_fail:
                self.world.assert_right(request, request.max_tokens)
        self.world.assert_clean()
        cache = self.world.scheduler.encoder_cache
        assert cache.num_freeable_slots == cache.cache_size
        assert self.world.encoder.cache.keys() <= cache.identifiers


IMAGE_SIZES = {image.identifier: image.num_embeds for image in (*IMAGES, BAD)}


@pytest.fixture
def machine(make_world) -> type[ImageMachine]:
    return type("BoundImageMachine", (ImageMachine,), {"make_world": staticmethod(make_world)})


@pytest.mark.slow
def test_random_histories_with_images(machine):
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=settings.default.max_examples // 2,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
