"""A server dies under load, over two prefill and two decode servers, and comes back at the same ports. Answers go on."""

import time

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.full]

EITHER = pytest.mark.parametrize("name", ["p0", "d0"])


@EITHER
def test_server_is_killed(faulty, name):
    with faulty.load() as load:
        began = time.monotonic()
        faulty.servers[name].kill()
        assert faulty.routed.wait_for_end(name) == 1
        faulty.note("kill to the end of the agent", time.monotonic() - began)
        load.wait_for_answers()


@EITHER
def test_engine_core_of_a_server_is_killed(faulty, name):
    with faulty.load() as load:
        began = time.monotonic()
        faulty.core(name).kill()
        assert faulty.routed.wait_for_end(name) == 1
        faulty.note("kill to the end of the agent", time.monotonic() - began)
        load.wait_for_answers()


def test_the_only_decode_server_is_killed(faulty):
    """A request that has begun waits for a decode engine, for ``router.worker_wait_s`` without a known supervisor."""
    with faulty.without("p1", "d1"):
        streams = [faulty.stream(300, max_tokens=40) for _ in range(2)]
        faulty.servers["d0"].kill()
        assert faulty.routed.wait_for_end("d0") == 1
        faulty.routed.start_agent("d1")
        for stream in streams:
            faulty.assert_right(stream.result())
