"""Whether a vLLM server makes progress."""

from agent.progress import ServerProgress
from agent.vllm_server import ServerLoad

LOAD_TIMEOUT_S = 30.0


def test_a_server_with_work_and_without_signs_is_stalled_until_the_next_one():
    progress = ServerProgress(0.0, LOAD_TIMEOUT_S)
    progress.begin(10.0)
    assert progress.reading(14.0, has_work=True).stalled_s == 4.0
    assert progress.reading(14.0, has_work=False).stalled_s == 0.0
    progress.note_load(ServerLoad(num_steps=5), 1, 14.0)
    assert progress.reading(14.0, has_work=True).stalled_s == 0.0
    progress.note_load(ServerLoad(num_steps=5), 1, 16.0)
    assert progress.reading(16.0, has_work=True).stalled_s == 2.0, "no new step"


def test_the_longest_gap_of_the_last_minute_counts():
    progress = ServerProgress(0.0, LOAD_TIMEOUT_S)
    progress.note(8.0)
    progress.note(9.0)
    assert progress.reading(10.0, has_work=True).slowest_step_s == 8.0
    assert progress.reading(68.5, has_work=True).slowest_step_s == 1.0
    assert not progress.reading(1000.0, has_work=True).is_restart_due


def test_a_server_that_only_loads_blocks_is_not_stalled_for_as_long_as_a_load_may_take():
    progress = ServerProgress(0.0, LOAD_TIMEOUT_S)
    for second in range(100):
        progress.note_load(ServerLoad(num_loading=2), 2, float(second))
        expected = 0.0 if second <= LOAD_TIMEOUT_S else second - LOAD_TIMEOUT_S
        assert progress.reading(float(second), has_work=True).stalled_s == expected


def test_a_server_that_loads_some_requests_and_does_not_compute_the_others_is_stalled():
    progress = ServerProgress(0.0, LOAD_TIMEOUT_S)
    progress.note_load(ServerLoad(num_loading=1, num_running=1), 2, 4.0)
    assert progress.reading(4.0, has_work=True).stalled_s == 4.0
