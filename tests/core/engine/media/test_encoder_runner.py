from array import array
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.ec_connector import EmbeddingsLayout
from core.engine.media.encoder_runner import EncoderRunner
from core.errors import EncoderInputMissing, InvalidRequest
from core.request import ModelRunnerOutput, NewRequestData, SchedulerOutput
from core.sched.encoder_cache import EncoderCacheManager
from core.wire.media import MMFeature
from core.wire.sampling import SamplingParams

IMAGE, HIDDEN = 3, 4
LAYOUT = EmbeddingsLayout(hidden_size=HIDDEN, dtype="float32")


class NumberedRows:
    """An encoder of files like ``b"7:5"``: five rows that name the image 7 and themselves. Counts what it computes."""

    def __init__(self):
        self.computed = []

    def identify(self, content):
        return content.ljust(16, b".")

    def prepare(self, content):
        if content.startswith(b"bad"):
            raise InvalidRequest("it is damaged")
        if content.startswith(b"big"):
            raise EncoderInputMissing("no memory")
        return np.array([int(number) for number in content.split(b":")])

    def prepared_bytes(self, num_embeds):
        return 16

    def embed(self, tiles):
        image, count = tiles.tolist()
        self.computed.append(b"%d:%d" % (image, count))
        return torch.tensor([[image, row, 0.0, 1.0] for row in range(count)])


def feature(content, offset, length, num_embeds, media_index=0):
    return MMFeature(
        identifier=content.ljust(16, b"."), offset=offset, length=length, num_embeds=num_embeds, media_index=media_index
    )


def new_data(name, token_ids, features, media):
    return NewRequestData(
        name,
        array("i", token_ids),
        len(token_ids),
        SamplingParams(),
        0,
        ([],),
        0,
        mm_features=tuple(features),
        media=tuple(media),
    )


def inputs_of(windows):
    """The step of {name: (start, end)}, as far as the encoder looks at it."""
    counts = [end - start for start, end in windows.values()]
    borders = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    positions = np.concatenate([np.arange(*window) for window in windows.values()])
    batch = SimpleNamespace(query_start_loc=borders)
    return SimpleNamespace(request_ids=list(windows), positions=positions, batches=[batch])


@pytest.fixture
def runner():
    return EncoderRunner(NumberedRows(), IMAGE, LAYOUT)


def start(runner, *new, **step):
    runner.start_step(SchedulerOutput(scheduled_new_reqs=list(new), **step))


def finish(runner):
    output = ModelRunnerOutput()
    runner.finish_step(SchedulerOutput(), output)
    return output


def merged(runner, windows):
    """Return {row of the step: (image, row of the image)}."""
    found = runner.merge(inputs_of(windows))
    if found is None:
        return {}
    return {row: tuple(value[:2]) for row, value in zip(found.rows.tolist(), found.values.int().tolist(), strict=True)}


@st.composite
def prompts(draw):
    """Return a prompt's tokens, its features and files: spans of image tokens mixed with text, text between and around."""
    tokens, features, media = [], [], []
    for image in range(draw(st.integers(1, 3))):
        tokens += draw(st.lists(st.integers(4, 9), max_size=4))
        inner = draw(st.lists(st.sampled_from([IMAGE, IMAGE, 5]), max_size=8))
        span = [IMAGE, *inner, IMAGE] if draw(st.booleans()) else [IMAGE]
        content = b"%d:%d" % (image, span.count(IMAGE))
        features.append(feature(content, len(tokens), len(span), span.count(IMAGE), image))
        media.append(content)
        tokens += span
    return tokens + draw(st.lists(st.sampled_from([IMAGE, 4]), max_size=3)), features, media


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(cases=st.lists(prompts(), min_size=1, max_size=3), data=st.data())
def test_in_any_chunks_each_image_token_takes_its_row(cases, data):
    runner = EncoderRunner(NumberedRows(), IMAGE, LAYOUT)
    requests = {str(number): case for number, case in enumerate(cases)}
    computed = dict.fromkeys(requests, 0)
    new = [new_data(name, *case) for name, case in requests.items()]
    scheduled = {}
    for name, (_, features, _) in requests.items():  # an item once per step, in any number of requests
        known = {item for other in list(requests)[: int(name)] for item in (f.identifier for f in requests[other][1])}
        scheduled[name] = [index for index, item in enumerate(features) if item.identifier not in known]
    start(runner, *new, scheduled_encoder_inputs=scheduled)
    while any(computed[name] < len(requests[name][0]) for name in requests):
        windows, expected, row = {}, {}, 0
        for name, (tokens, features, _) in requests.items():
            left = len(tokens) - computed[name]
            count = data.draw(st.integers(0 if windows else 1, left)) if left else 0  # so that one request goes on
            if not count:
                continue
            windows[name] = computed[name], computed[name] + count
            computed[name] += count
            for position in range(*windows[name]):
                for image, item in enumerate(features):
                    if tokens[position] == IMAGE and item.offset <= position < item.end:
                        expected[row] = (image, tokens[item.offset : position].count(IMAGE))
                row += 1
        assert merged(runner, windows) == expected
    assert finish(runner).failed_embeddings == {}


def test_text_requests_and_tokens_behind_the_images_cost_nothing(runner):
    assert runner.merge(inputs_of({"text": (0, 5)})) is None
    item = feature(b"1:2", 1, 2, 2)
    start(runner, new_data("a", [4, IMAGE, IMAGE, 4, IMAGE], [item], [b"1:2"]), scheduled_encoder_inputs={"a": [0]})
    assert merged(runner, {"text": (0, 5), "a": (0, 5)}) == {6: (1, 0), 7: (1, 1)}
    assert runner.merge(inputs_of({"a": (3, 5)})) is None


def test_what_the_scheduler_frees_is_deleted_and_what_it_keeps_serves_others(runner):
    item = feature(b"1:1", 0, 1, 1)
    start(runner, new_data("a", [IMAGE], [item], [b"1:1"]), scheduled_encoder_inputs={"a": [0]})
    finish(runner)
    start(runner, new_data("b", [IMAGE], [item], []), finished_req_ids={"a"})
    assert merged(runner, {"b": (0, 1)}) == {0: (1, 0)}
    finish(runner)
    start(runner, free_encoder_identifiers=[item.identifier])
    assert runner.cache == {}
    assert merged(runner, {"b": (0, 1)}) == {}
    assert finish(runner).failed_embeddings[item.identifier].code == "encoder_input_missing"


def test_a_request_preempted_in_the_step_still_has_its_image_computed(runner):
    item = feature(b"1:1", 0, 1, 1)
    start(runner, new_data("a", [IMAGE], [item], [b"1:1"]))
    start(runner, scheduled_encoder_inputs={"a": [0]}, preempted_req_ids={"a"})
    assert list(runner.cache) == [item.identifier]
    assert merged(runner, {"a": (0, 1)}) == {}  # forgotten until it resumes
    start(runner, new_data("a", [IMAGE, 4], [item], [b"1:1"]))
    assert merged(runner, {"a": (0, 2)}) == {0: (1, 0)}


@pytest.mark.parametrize(
    ("content", "num_embeds", "code", "message"),
    [
        (b"bad", 1, "invalid_request", "it is damaged"),
        (b"1:2", 1, "encoder_input_missing", "it has 2 embeddings for 1 image tokens, 1 were announced"),
        (b"1:1", 2, "encoder_input_missing", "it has 1 embeddings for 1 image tokens, 2 were announced"),
    ],
)
def test_a_bad_image_is_reported_and_nothing_is_kept_of_it(runner, content, num_embeds, code, message):
    item = feature(content, 0, 1, num_embeds)
    start(runner, new_data("a", [IMAGE], [item], [content]), scheduled_encoder_inputs={"a": [0]})
    assert merged(runner, {"a": (0, 1)}) == {}
    error = finish(runner).failed_embeddings[item.identifier]
    assert (error.code, error.message, error.param) == (code, message, None)
    assert runner.cache == {}
    start(runner)
    assert finish(runner).failed_embeddings == {}  # told once


def test_embeddings_with_a_wrong_number_of_rows_are_reported_and_dropped(runner):
    """The scheduler counts what has failed as gone: a tensor that stayed would take uncounted room."""
    item = feature(b"1:2", 0, 2, 2)
    start(runner, new_data("a", [IMAGE, IMAGE], [item], [b"1:2"]))
    runner.cache[item.identifier] = torch.zeros(3, HIDDEN)
    assert merged(runner, {"a": (0, 2)}) == {}
    assert "3 embeddings for 2 image tokens" in finish(runner).failed_embeddings[item.identifier].message
    assert runner.cache == {}


def test_an_image_that_came_back_in_its_eviction_and_fails_leaves_nothing():
    """The worker has not been told to delete it; the scheduler forgets it because of the failure."""
    image, other = feature(b"big", 0, 2, 2), feature(b"1:2", 0, 2, 2)
    manager, runner = EncoderCacheManager(2), EncoderRunner(NumberedRows(), IMAGE, LAYOUT)
    users = {name: SimpleNamespace(request_id=name, mm_features=[item]) for name, item in (("a", image), ("b", other))}
    manager.allocate(users["a"], 0)
    runner.cache[image.identifier] = torch.zeros(2, HIDDEN)
    manager.free(users["a"])
    for user in (users["b"], users["a"]):
        assert manager.can_allocate(user, 0, 2, 0)
        manager.allocate(user, 0)
        manager.free(user)
    freed = manager.take_freed_identifiers()
    start(
        runner,
        new_data("a", [IMAGE, IMAGE], [image], [b"big"]),
        scheduled_encoder_inputs={"a": [0]},
        free_encoder_identifiers=freed,
    )
    for identifier in finish(runner).failed_embeddings:
        manager.forget(identifier)
    assert runner.cache.keys() == manager.identifiers == set()


def test_a_step_that_begins_before_the_last_one_has_ended_keeps_its_failures(runner):
    start(runner)
    item = feature(b"bad", 0, 1, 1)
    start(runner, new_data("a", [IMAGE], [item], [b"bad"]), scheduled_encoder_inputs={"a": [0]})
    assert finish(runner).failed_embeddings == {}
    assert list(finish(runner).failed_embeddings) == [item.identifier]


def test_another_file_under_an_identifier_is_not_computed(runner):
    item = feature(b"1:1", 0, 1, 1)
    start(runner, new_data("a", [IMAGE], [item], [b"2:1"]), scheduled_encoder_inputs={"a": [0]})
    error = finish(runner).failed_embeddings[item.identifier]
    assert (error.code, error.retryable) == ("encoder_input_missing", True)
    assert "not the image that was announced" in error.message
    assert runner.cache == {}


def test_an_image_that_there_is_no_memory_for_is_not_the_clients_fault(runner):
    item = feature(b"big", 1, 1, 1)
    start(runner, new_data("r", [4, IMAGE, 5], [item], [b"big"]), scheduled_encoder_inputs={"r": [0]})
    error = finish(runner).failed_embeddings[item.identifier]
    assert (error.code, error.http_status, error.retryable) == ("encoder_input_missing", 503, True)
    assert error.message == "no memory"
