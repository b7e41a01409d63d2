"""What every EC connector must do: a test class to derive from.

    class TestMine(ECConformance):
        def make_connector(self, name, is_encoder, settings):
            return my_connector(...)

``encoder`` has computed embeddings, ``reader`` needs them. Whatever fault is between them, a request computes on the rows of
its own image; it ends within its time; and afterwards no item is held. Imports pytest; only tests import this module.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import ClassVar

import msgspec
import pytest
import pytest_asyncio

from connectors.testing.ec_engine import LAYOUT, ECEngine, NamedImage, identifier_of
from core.clock import SystemClock
from core.config_workers import ECConnectorSection
from core.ec_connector import ECConnector, EmbeddingsLayout
from core.errors import EncoderInputMissing, Full
from core.request import Request
from core.wire.media import ECSource

CHUNK_BYTES = 64 * LAYOUT.hidden_size * LAYOUT.itemsize
SHORT_S = 0.2  # the time of a request that should time out
SETTINGS = ECConnectorSection(memory_bytes=16 * CHUNK_BYTES, transfer_deadline_s=10.0)


async def poll_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Check the condition again and again, while the event loop and other threads run.

    Raises:
        TimeoutError: the condition does not hold after ``timeout_s``.
    """
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.001)


class ECSide:
    """A connector and an engine without a model."""

    def __init__(self, connector: ECConnector, layout: EmbeddingsLayout = LAYOUT) -> None:
        self.connector = connector
        self.engine = ECEngine(connector.scheduler, connector.worker, layout)

    async def start(self) -> ECSide:
        """Start as a worker does."""
        self.engine.register()
        await self.connector.start()
        return self


@pytest.mark.asyncio
class ECConformance:
    """The tests. Connectors have the system's clock.

    ``announces`` is True where a reader finds only announced embeddings, and leases hold them.
    """

    announces: ClassVar[bool] = True

    @abstractmethod
    def make_connector(self, name: str, is_encoder: bool, settings: ECConnectorSection) -> ECConnector:
        """Return a new connector that is not started, for the worker ``name``."""

    def damage(self, encoder: ECSide, image: NamedImage) -> None:
        """Change a byte of a stored image without the connector's knowledge."""
        raise NotImplementedError

    async def lose(self, encoder: ECSide) -> None:
        """Kill the process that holds the embeddings."""
        raise NotImplementedError

    def num_held(self, side: ECSide) -> int:
        """Return how much of a reader's memory is in use for requests, or in quarantine."""
        raise NotImplementedError

    async def new_side(self, name: str, is_encoder: bool, settings: ECConnectorSection = SETTINGS) -> ECSide:
        """Return a worker that has started; it is stopped at the end of the test."""
        side = ECSide(self.make_connector(name, is_encoder, settings))
        self._sides.append(side)
        return await side.start()

    @pytest_asyncio.fixture(autouse=True)
    async def _stopped(self) -> AsyncIterator[None]:
        self._sides: list[ECSide] = []
        yield
        for side in reversed(self._sides):
            await side.connector.stop()

    @pytest_asyncio.fixture
    async def encoder(self) -> ECSide:
        """Return the worker that computes for others."""
        return await self.new_side("encoder", True, msgspec.structs.replace(SETTINGS, memory_bytes=64 * CHUNK_BYTES))

    @pytest_asyncio.fixture
    async def reader(self) -> ECSide:
        """Return the worker that needs embeddings."""
        return await self.new_side("reader", False)

    async def sources(self, encoder: ECSide, images: Sequence[NamedImage]) -> list[ECSource]:
        """Let the encoder compute images."""
        return [await encoder.engine.save(image) for image in images]

    async def assert_is_empty(self, encoder: ECSide | None, reader: ECSide) -> None:
        """Check that no item is held once all requests have ended; a lost encoder does not count."""
        for request in [*reader.engine.waiting.values(), *reader.engine.ran.values()]:
            reader.engine.finish(request)
        reader.engine.step()

        def is_empty() -> bool:
            reader.engine.step()
            return not (self.num_held(reader) or (encoder is not None and encoder.connector.num_leased_chunks()))

        await poll_until(is_empty)

    async def run_one(self, reader: ECSide, images: Sequence[NamedImage], sources: Sequence[ECSource]) -> Request:
        """Run a request to its embeddings."""
        request = reader.engine.add("r", images, sources)
        await reader.engine.run(request)
        assert "r" in reader.engine.ran
        return request

    # ---- bytes -------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("num_embeds", [1, 63, 64, 65, 200])
    async def test_rows_arrive_exactly(self, encoder: ECSide, reader: ECSide, num_embeds: int) -> None:
        image = NamedImage("a", num_embeds)
        await self.run_one(reader, [image], await self.sources(encoder, [image]))
        assert reader.engine.loaded == [image.identifier]
        assert reader.engine.computed == []
        await self.assert_is_empty(encoder, reader)

    @pytest.mark.parametrize(("dtype", "hidden_size"), [("bfloat16", 3), ("float16", 8)])
    async def test_rows_of_other_types_arrive_exactly(self, dtype: str, hidden_size: int) -> None:
        layout, image = EmbeddingsLayout(hidden_size, dtype, itemsize=2), NamedImage("a", 65)
        sides = []
        for name in ("encoder", "reader"):
            side = ECSide(self.make_connector(name, name == "encoder", SETTINGS), layout)
            self._sides.append(side)
            sides.append(await side.start())
        await self.run_one(sides[1], [image], await self.sources(sides[0], [image]))
        assert sides[1].engine.loaded == [image.identifier]

    async def test_a_request_waits_and_then_has_all_its_images(self, encoder: ECSide, reader: ECSide) -> None:
        images = [NamedImage("a", 100), NamedImage("b", 64), NamedImage("c", 1)]
        sources = await self.sources(encoder, images)
        request = reader.engine.add("r", images, sources)
        assert not reader.engine.scheduler.ensure_cache_available(request, 0), "nothing is here when it first asks"
        await reader.engine.run(request)
        assert sorted(reader.engine.loaded) == sorted(image.identifier for image in images)
        await self.assert_is_empty(encoder, reader)

    async def test_asking_again_changes_nothing(self, encoder: ECSide, reader: ECSide) -> None:
        image = NamedImage("a")
        request = reader.engine.add("r", [image], await self.sources(encoder, [image]))
        for _ in range(5):
            reader.engine.scheduler.ensure_cache_available(request, 0)
        await reader.engine.run(request)
        assert reader.engine.loaded == [image.identifier]
        await self.assert_is_empty(encoder, reader)

    async def test_images_after_the_computed_tokens_are_not_fetched(self, encoder: ECSide, reader: ECSide) -> None:
        images = [NamedImage("a"), NamedImage("b")]
        request = reader.engine.add("r", images, await self.sources(encoder, images))
        end = request.mm_features[0].end

        def has_come() -> bool:
            return reader.engine.scheduler.ensure_cache_available(request, end)

        del reader.engine.waiting["r"]  # requested by hand
        assert not has_come()
        await reader.engine.until(has_come)
        assert not reader.engine.scheduler.has_cache_item(images[0].identifier)
        assert reader.engine.scheduler.has_cache_item(images[1].identifier)
        assert reader.engine.scheduler.ensure_cache_available(request, request.mm_end)
        assert not reader.engine.scheduler.has_cache_item(images[1].identifier), "it is kept for a request that is beyond it"
        reader.engine.finish(request)
        await self.assert_is_empty(encoder, reader)

    # ---- the same image again ----------------------------------------------------------------------------------------

    async def test_one_fetch_serves_all_requests_that_wait_for_an_image(self, encoder: ECSide, reader: ECSide) -> None:
        image = NamedImage("a")
        requests = [reader.engine.add(f"r{number}", [image, image], [await encoder.engine.save(image)]) for number in range(3)]
        for request in requests:
            await reader.engine.run(request)
        assert reader.engine.loaded == [image.identifier]
        assert encoder.engine.computed == [image.identifier], "an image was encoded twice"
        await self.assert_is_empty(encoder, reader)

    async def test_an_image_that_was_fetched_before_needs_no_fetch(self, encoder: ECSide, reader: ECSide) -> None:
        image = NamedImage("a")
        first = await self.run_one(reader, [image], await self.sources(encoder, [image]))
        reader.engine.finish(first)
        reader.engine.forget()
        again = reader.engine.add("again", [image], await self.sources(encoder, [image]))
        assert reader.engine.scheduler.ensure_cache_available(again, 0)
        await reader.engine.run(again)
        assert reader.engine.loaded == [image.identifier] * 2
        await self.assert_is_empty(encoder, reader)

    # ---- wrong announcements -------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        "change",
        [{"identifier": identifier_of("b")}, {"num_embeds": 65}, {"hidden_size": 9}, {"dtype": "float16"}],
        ids=lambda change: next(iter(change)),
    )
    async def test_seal_of_something_else_is_refused_at_once(
        self, encoder: ECSide, reader: ECSide, change: dict[str, object]
    ) -> None:
        image = NamedImage("a")
        (source,) = await self.sources(encoder, [image])
        wrong = msgspec.structs.replace(source, seal=msgspec.structs.replace(source.seal, **change))
        request = reader.engine.add("r", [image], [wrong])
        request.ec_sources = {image.identifier: wrong}
        reader.engine.step()
        assert reader.engine.computed == [image.identifier], "it was waited for"
        await self.assert_is_empty(encoder, reader)

    async def test_embeddings_of_another_image_are_not_used(self, encoder: ECSide, reader: ECSide) -> None:
        """The announcing worker mistakes one image for another, and names the other's embeddings by this one's identifier."""
        image, other = NamedImage("a"), NamedImage("b")
        (source,) = await self.sources(encoder, [other])
        seal = msgspec.structs.replace(source.seal, identifier=image.identifier)
        await self.run_one(reader, [image], [msgspec.structs.replace(source, seal=seal)])
        assert reader.engine.computed == [image.identifier]
        await self.assert_is_empty(encoder, reader)

    async def test_embeddings_of_another_shape_are_not_used(self, encoder: ECSide, reader: ECSide) -> None:
        image = NamedImage("a", 130)
        (source,) = await self.sources(encoder, [replace(image, num_embeds=150)])
        seal = msgspec.structs.replace(source.seal, num_embeds=130)
        await self.run_one(reader, [image], [msgspec.structs.replace(source, seal=seal)])
        assert reader.engine.computed == [image.identifier]
        await self.assert_is_empty(encoder, reader)

    async def test_digest_of_something_else_is_noticed(self, encoder: ECSide, reader: ECSide) -> None:
        """Where any worker may have written the memory, only the seals of the chunks say what it holds."""
        image = NamedImage("a", 100)
        (source,) = await self.sources(encoder, [image])
        seal = msgspec.structs.replace(source.seal, digest=source.seal.digest ^ 1)
        await self.run_one(reader, [image], [msgspec.structs.replace(source, seal=seal)])
        assert (reader.engine.computed == [image.identifier]) == self.announces
        await self.assert_is_empty(encoder, reader)

    @pytest.mark.parametrize("payload", [b"", b"\x00", b"\xc1", b"\x81\xa1a" * 9])
    async def test_payload_that_says_nothing_does_no_harm(self, encoder: ECSide, reader: ECSide, payload: bytes) -> None:
        image = NamedImage("a")
        (source,) = await self.sources(encoder, [image])
        request = reader.engine.add("r", [image], [msgspec.structs.replace(source, payload=payload)])
        await reader.engine.run(request)
        assert "r" in reader.engine.ran

    async def test_what_is_meant_for_another_connector_is_not_read(self, encoder: ECSide, reader: ECSide) -> None:
        image = NamedImage("a")
        (source,) = await self.sources(encoder, [image])
        await self.run_one(reader, [image], [msgspec.structs.replace(source, connector="another", payload=b"x")])
        assert (reader.engine.computed == [image.identifier]) == self.announces

    async def test_an_image_that_no_worker_has_is_computed(self, encoder: ECSide, reader: ECSide) -> None:
        await self.run_one(reader, [NamedImage("a")], [])
        assert reader.engine.computed == [identifier_of("a")]
        await self.assert_is_empty(encoder, reader)

    async def test_without_image_and_embeddings_that_request_alone_fails(self, encoder: ECSide, reader: ECSide) -> None:
        image = NamedImage("b")
        lost = reader.engine.add("lost", [NamedImage("a")], has_images=False)
        other = reader.engine.add("other", [image], await self.sources(encoder, [image]))
        await reader.engine.run(other)
        await reader.engine.run(lost)
        assert reader.engine.errors["lost"].code == EncoderInputMissing.code
        assert "other" in reader.engine.ran
        await self.assert_is_empty(encoder, reader)

    # ---- bytes and peers that go wrong -------------------------------------------------------------------------------

    @pytest.mark.parametrize("has_images", [True, False])
    async def test_corrupt_byte_is_noticed(self, encoder: ECSide, reader: ECSide, has_images: bool) -> None:
        image = NamedImage("a", 130)
        sources = await self.sources(encoder, [image])
        self.damage(encoder, image)
        request = reader.engine.add("r", [image], sources, has_images=has_images)
        await reader.engine.run(request)
        assert ("r" in reader.engine.ran) == has_images
        assert reader.engine.loaded == []
        if not has_images:
            assert "digest" in reader.engine.errors["r"].message
        await self.assert_is_empty(encoder, reader)

    @pytest.mark.parametrize("has_images", [True, False])
    async def test_holder_that_died_costs_time_only(self, encoder: ECSide, reader: ECSide, has_images: bool) -> None:
        images = [NamedImage("a"), NamedImage("b", 200)]
        sources = await self.sources(encoder, images)
        await self.lose(encoder)
        request = reader.engine.add("r", images, sources, has_images=has_images)
        await reader.engine.run(request)
        assert ("r" in reader.engine.ran) == has_images
        if not has_images:
            assert reader.engine.errors["r"].code == EncoderInputMissing.code
        await self.assert_is_empty(None, reader)

    async def test_holder_that_dies_between_two_requests(self, encoder: ECSide, reader: ECSide) -> None:
        sources = await self.sources(encoder, [NamedImage("a"), NamedImage("b")])
        await self.run_one(reader, [NamedImage("a")], sources[:1])
        await self.lose(encoder)
        request = reader.engine.add("second", [NamedImage("b")], sources[1:])
        await reader.engine.run(request)
        assert reader.engine.computed == [identifier_of("b")]

    # ---- ends before their time --------------------------------------------------------------------------------------

    @pytest.mark.parametrize("turns", [None, 0, 1, 3, 10, 100])
    async def test_abort_while_fetching_leaves_nothing(self, encoder: ECSide, reader: ECSide, turns: int | None) -> None:
        """``turns`` of the event loop pass between the step that starts the fetch and the abort; None: no step either."""
        image = NamedImage("a", 500)
        request = reader.engine.add("r", [image], await self.sources(encoder, [image]))
        if turns is not None:
            reader.engine.step()
        for _ in range(turns or 0):
            await asyncio.sleep(0)
        reader.engine.finish(request)
        await self.assert_is_empty(encoder, reader)
        again = reader.engine.add("again", [image], await self.sources(encoder, [image]))
        await reader.engine.run(again)
        assert reader.engine.loaded == [image.identifier]
        await self.assert_is_empty(encoder, reader)

    async def test_abort_of_one_leaves_the_other_its_fetch(self, encoder: ECSide, reader: ECSide) -> None:
        image = NamedImage("a", 500)
        first = reader.engine.add("first", [image], await self.sources(encoder, [image]))
        second = reader.engine.add("second", [image], await self.sources(encoder, [image]), has_images=False)
        reader.engine.step()
        reader.engine.finish(first)
        await reader.engine.run(second)
        assert reader.engine.loaded == [image.identifier]
        await self.assert_is_empty(encoder, reader)

    # ---- room --------------------------------------------------------------------------------------------------------

    async def test_items_that_no_worker_can_compute_are_kept_and_others_make_room(
        self, encoder: ECSide, reader: ECSide
    ) -> None:
        """The reader has 16 chunks: two of these at a time, of which one is kept."""
        kept_image = NamedImage("kept", 5 * 64)
        kept = reader.engine.add("kept", [kept_image], await self.sources(encoder, [kept_image]), has_images=False)
        await reader.engine.run(kept)
        for number in range(4):
            image = NamedImage(f"other-{number}", 10 * 64)
            request = reader.engine.add("r", [image], await self.sources(encoder, [image]))
            await reader.engine.run(request)
            reader.engine.finish(request)
            reader.engine.forget()
            assert reader.engine.scheduler.has_cache_item(kept_image.identifier)
        reader.engine.preempt(kept)
        await reader.engine.run(kept)
        assert reader.engine.errors == {}
        assert reader.engine.computed == []
        await self.assert_is_empty(encoder, reader)

    async def test_preempted_request_finds_its_embeddings_again_or_computes_them(self, encoder: ECSide, reader: ECSide) -> None:
        image, other = NamedImage("a", 10 * 64), NamedImage("b", 10 * 64)
        request = await self.run_one(reader, [image], await self.sources(encoder, [image]))
        reader.engine.forget()
        reader.engine.preempt(request)
        await reader.engine.run(request)
        assert reader.engine.loaded == [image.identifier] * 2
        await reader.engine.run(reader.engine.add("other", [other], await self.sources(encoder, [other])))
        reader.engine.forget()
        reader.engine.preempt(request)
        await reader.engine.run(request)
        assert reader.engine.computed == ([image.identifier] if self.announces else [])
        await self.assert_is_empty(encoder, reader)

    async def test_item_without_room_waits_until_others_have_ended(self, encoder: ECSide, reader: ECSide) -> None:
        images = [NamedImage("a", 10 * 64), NamedImage("b", 9 * 64)]
        holder = reader.engine.add("holder", images[:1], await self.sources(encoder, images[:1]), has_images=False)
        await reader.engine.run(holder)
        waiter = reader.engine.add("waiter", images[1:], await self.sources(encoder, images[1:]))
        for _ in range(3):
            reader.engine.step()
        assert "waiter" in reader.engine.waiting
        reader.engine.finish(holder)
        await reader.engine.run(waiter)
        assert reader.engine.computed == []
        await self.assert_is_empty(encoder, reader)

    async def test_item_larger_than_the_memory_is_computed(self, encoder: ECSide, reader: ECSide) -> None:
        image = NamedImage("a", 17 * 64)
        await self.run_one(reader, [image], await self.sources(encoder, [image]))
        assert reader.engine.computed == [image.identifier]
        await self.assert_is_empty(encoder, reader)

    async def test_time_that_is_over_ends_the_wait(self, encoder: ECSide, reader: ECSide) -> None:
        """There is no room while the first request lives."""
        images = [NamedImage("a", 10 * 64), NamedImage("b", 9 * 64)]
        holder = reader.engine.add("holder", images[:1], await self.sources(encoder, images[:1]), has_images=False)
        await reader.engine.run(holder)
        waiter = reader.engine.add("waiter", images[1:], await self.sources(encoder, images[1:]))
        waiter.deadline = SystemClock().now() + SHORT_S
        await reader.engine.run(waiter)
        assert reader.engine.computed == [images[1].identifier]
        await self.assert_is_empty(encoder, reader)

    async def test_encoder_that_has_no_room_reports_it(self) -> None:
        small = await self.new_side("small", True, msgspec.structs.replace(SETTINGS, memory_bytes=CHUNK_BYTES))
        with pytest.raises(KeyError):
            await small.engine.save(NamedImage("a", 65))
        assert small.engine.not_saved[identifier_of("a")].code == Full.code
