"""The worker that a session prefers."""

from collections import Counter

from router.routing.affinity import rank, slack_ms, with_preference

WORKERS = [(f"p{number}", 1) for number in range(8)]


def favourite(session, workers=WORKERS):
    return rank(session, workers)[0]


def test_every_router_and_every_start_chooses_alike():
    assert rank(b"session", WORKERS) == rank(b"session", reversed(WORKERS))
    assert favourite(b"golden") == ("p5", 1)  # another value would scatter all sessions at an upgrade


def test_a_restarted_worker_keeps_its_sessions():
    restarted = [(name, 2) for name, _ in WORKERS]
    for number in range(50):
        assert favourite(b"%d" % number)[0] == favourite(b"%d" % number, restarted)[0]


def test_a_worker_that_leaves_moves_only_its_own_sessions():
    for number in range(200):
        before, after = favourite(b"%d" % number), favourite(b"%d" % number, WORKERS[1:])
        assert before == after or before == WORKERS[0]


def test_sessions_are_spread():
    counts = Counter(favourite(b"%d" % number) for number in range(1600))
    assert len(counts) == 8
    assert min(counts.values()) > 130


def test_only_about_equal_workers_are_compared():
    scores = {WORKERS[0]: 100.0, WORKERS[1]: 101.0, WORKERS[2]: 150.0}
    for number in range(20):
        found = with_preference(scores, 5.0, b"%d" % number)
        assert found.keys() == {WORKERS[0], WORKERS[1]}
        assert min(found, key=found.__getitem__) == favourite(b"%d" % number, WORKERS[:2])
        assert all(100.0 <= score < 105.0 for score in found.values())


def test_slack_is_a_part_of_the_own_time_of_the_cheapest():
    assert slack_ms([(90.0, 40.0), (50.0, 20.0)]) == 1.0
    assert slack_ms([]) == 0.0
