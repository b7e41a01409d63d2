"""Whether a vLLM server makes progress."""

from agent.progress import ServerProgress


def test_a_server_with_work_and_without_signs_is_stalled_until_the_next_one():
    progress = ServerProgress(0.0)
    progress.begin(10.0)
    assert progress.reading(14.0, has_work=True).stalled_s == 4.0
    assert progress.reading(14.0, has_work=False).stalled_s == 0.0
    progress.note_look(5, 0.2, 14.0)
    assert progress.reading(14.0, has_work=True).stalled_s == 0.0
    progress.note_look(5, 0.2, 16.0)
    assert progress.reading(16.0, has_work=True).stalled_s == 2.0, "no new step"


def test_a_prompt_that_takes_more_and_more_blocks_is_being_computed():
    """vLLM counts no step that brings no token, as those of all chunks of a prompt but the last."""
    progress = ServerProgress(0.0)
    for second in range(1, 60):
        progress.note_look(5, second / 100, float(second))
        assert progress.reading(float(second), has_work=True).stalled_s == 0.0
    progress.note_look(5, 0.3, 65.0)
    assert progress.reading(65.0, has_work=True).stalled_s == 6.0, "blocks are freed without a step, too"
    progress.note_look(5, 0.4, 66.0)
    assert progress.reading(66.0, has_work=True).stalled_s == 0.0


def test_the_longest_gap_of_the_last_minute_counts():
    progress = ServerProgress(0.0)
    progress.note(2.0)
    progress.note(8.0)
    progress.note(9.0)
    assert progress.reading(10.0, has_work=True).slowest_step_s == 6.0
    assert progress.reading(68.5, has_work=True).slowest_step_s == 1.0
    assert not progress.reading(1000.0, has_work=True).is_restart_due


def test_a_stall_lets_the_next_one_be_noticed_about_as_soon():
    progress = ServerProgress(0.0)
    bound_s = progress.reading(0.0, has_work=True).bound_s
    progress.note(100.0)
    assert bound_s < progress.reading(100.0, has_work=True).bound_s < 1.5 * bound_s


def test_a_server_that_has_become_slow_is_soon_left_in_peace():
    progress = ServerProgress(0.0)
    for number in range(1, 10):
        progress.note(8.0 * number)
    assert progress.reading(72.0, has_work=True).bound_s > 8.0
