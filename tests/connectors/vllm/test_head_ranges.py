"""Which ranks are read: each of our heads once, from a rank that has it, for all sizes of both sides."""

import pytest

from connectors.vllm.head_ranges import HeadSource, head_sources, heads_of, leased_peers
from core.kv.block_form import HeadRange

SIZES = (1, 2, 4, 8)


def test_heads_are_split_or_replicated_as_vllm_does():
    assert [list(heads_of(rank, 2, 4)) for rank in range(2)] == [[0, 1], [2, 3]]
    assert [list(heads_of(rank, 8, 2)) for rank in range(8)] == [[0]] * 4 + [[1]] * 4
    assert [list(heads_of(rank, 4, 1)) for rank in range(4)] == [[0]] * 4


@pytest.mark.parametrize("num_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("num_peers", SIZES)
@pytest.mark.parametrize("num_ranks", SIZES)
def test_each_head_of_ours_is_read_once_from_a_rank_that_has_it(num_ranks, num_peers, num_heads):
    released = set()
    for rank in range(num_ranks):
        ours = heads_of(rank, num_ranks, num_heads)
        read = []
        for peer, heads in head_sources(rank, num_ranks, num_peers, num_heads):
            theirs = heads_of(peer, num_peers, num_heads)
            if heads is None:
                assert theirs == ours
                read += ours
                continue
            wanted = [ours[heads.local_first + index] for index in range(heads.num_heads)]
            assert [theirs[heads.remote_first + index] for index in range(heads.num_heads)] == wanted
            read += wanted
        assert read == list(ours)
        leased = leased_peers(rank, num_ranks, num_peers, num_heads)
        assert {source.peer_rank for source in head_sources(rank, num_ranks, num_peers, num_heads)} <= set(leased)
        released.update(leased)
    assert released == set(range(num_peers)), "a lease that no rank releases keeps blocks until it expires"


@pytest.mark.parametrize(("num_peers", "num_heads"), [(3, 4), (6, 8), (3, 8), (6, 4)])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_leases_on_ranks_that_the_heads_cannot_be_split_among_are_released(num_ranks, num_peers, num_heads):
    """P may run another model, or a client may have written the ranks: D refuses the handoff, and releases it."""
    leased = [leased_peers(rank, num_ranks, num_peers, num_heads) for rank in range(num_ranks)]
    assert sorted(peer for peers in leased for peer in peers) == list(range(num_peers))


@pytest.mark.parametrize("num_heads", [1, 2, 8])
@pytest.mark.parametrize("size", SIZES)
def test_engines_of_one_size_read_rank_by_rank(size, num_heads):
    for rank in range(size):
        assert head_sources(rank, size, size, num_heads) == (HeadSource(rank, None),)
        assert leased_peers(rank, size, size, num_heads) == (rank,)


def test_readers_of_a_latent_are_spread():
    assert [head_sources(rank, 4, 2, 1) for rank in range(4)] == [(HeadSource(rank % 2, None),) for rank in range(4)]


def test_a_rank_reads_its_part_of_a_larger_block():
    assert head_sources(1, 2, 1, 4) == (HeadSource(0, HeadRange(2, 0, 2)),)
    assert head_sources(0, 1, 2, 4) == (HeadSource(0, HeadRange(0, 0, 2)), HeadSource(1, HeadRange(0, 2, 2)))
