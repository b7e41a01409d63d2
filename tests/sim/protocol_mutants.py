"""Deliberate defects of the protocol, looked for in plans as ``kvferry sim`` draws them.

Each replaces one function of the real code by one with a plausible mistake in its source. Unlike those of
``test_mutants`` none chooses the faults under which it shows. ``python -m tests.sim.protocol_mutants`` prints for each the
first of a hundred seeds that finds it, and how.
"""

from __future__ import annotations

import dataclasses
import heapq
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import connectors.p2p.consumer.verification
import router.dispatch.policy
from connectors.p2p.consumer.held_leases import HeldLeases
from connectors.p2p.consumer.inflight_reads import InflightReads
from connectors.p2p.consumer.peers import Peers
from connectors.p2p.consumer.pull import PullProtocol
from connectors.p2p.consumer.transport_health import TransportHealth
from connectors.p2p.consumer.verification import SealCheck, Verdict
from connectors.p2p.producer.leases import LeaseTable
from connectors.p2p.scheduler import P2PConnectorScheduler
from core.kv.block import KVCacheBlock
from core.kv.manager import KVCacheManager
from core.kv.pool import BlockPool
from core.kv.seals import BROKEN, SealTable, decode_seal
from core.worker.router_membership import RouterMembership
from core.worker.serving import Serving
from kvferry.sim.cluster import SimCluster
from kvferry.sim.race_plan import draw_any_plan
from kvferry.sim.runs import silence
from router.contents.reports import ReportedContents
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.namesakes import Namesakes
from router.dispatch.progress import WorkerProgress
from router.dispatch.retries import Retries
from router.dispatch.waiting import Waiting

NUM_RUNS = 100

Patch = Callable[[object, str, object], None]  # monkeypatch.setattr


@dataclass(frozen=True, slots=True)
class Mutant:
    """A defect, and one of the first hundred seeds that finds it; None = none is known."""

    apply: Callable[[Patch], None]
    seed: int | None

    @property
    def name(self) -> str:
        """The defect."""
        return self.apply.__name__.replace("_", " ")


def violations_of(seed: int) -> list[str]:
    """Play a seed; a mistake of the mutant itself is no find."""
    violations = SimCluster(draw_any_plan(seed)).run().violations
    assert not any("TypeError" in each or "AttributeError" in each or "NameError" in each for each in violations), violations
    return violations


def returns(value: object) -> Callable[..., object]:
    return lambda *_args, **_kwargs: value


# ---- seals and generations ---------------------------------------------------------------------------------------------


def switch_the_seal_check_off(patch: Patch) -> None:
    patch(SealCheck, "verdict", lambda self, seals, digests: Verdict(good=list(self._units)))


def let_broken_seals_pass(patch: Patch) -> None:
    real = connectors.p2p.consumer.verification.find_mismatch

    def find_mismatch(row, expected, incarnation, layout_version):
        found = real(row, expected, incarnation, layout_version)
        return None if int.from_bytes(row[-8:], "little") == BROKEN else found

    patch(connectors.p2p.consumer.verification, "find_mismatch", find_mismatch)
    patch(connectors.p2p.consumer.verification, "_find_corruption", returns(None))


def compare_seals_without_their_generation(patch: Patch) -> None:
    real = connectors.p2p.consumer.verification.find_mismatch

    def find_mismatch(row, expected, incarnation, layout_version):
        seal = decode_seal(row)
        same = expected if seal is None else dataclasses.replace(expected, generation=seal.generation)
        return real(row, same, incarnation, layout_version)

    patch(connectors.p2p.consumer.verification, "find_mismatch", find_mismatch)


def compare_seals_without_their_hash(patch: Patch) -> None:
    real = connectors.p2p.consumer.verification.find_mismatch

    def find_mismatch(row, expected, incarnation, layout_version):
        seal = decode_seal(row)
        fields = {} if seal is None else {"generation": seal.generation, "block_hash": seal.block_hash}
        return real(row, dataclasses.replace(expected, **fields), incarnation, layout_version)

    patch(connectors.p2p.consumer.verification, "find_mismatch", find_mismatch)


def leave_old_seals_in_landing_rows(patch: Patch) -> None:
    patch(SealTable, "clear_landing", returns(None))


def reuse_blocks_without_a_new_generation(patch: Patch) -> None:
    real = BlockPool.get_new_blocks

    def get_new_blocks(self, count):
        blocks = real(self, count)
        for block in blocks:
            block.generation -= 1
        return blocks

    patch(BlockPool, "get_new_blocks", get_new_blocks)


def rewrite_blocks_without_breaking_their_seals(patch: Patch) -> None:
    def rewrite_blocks(self, blocks):
        for block in blocks:
            block.generation += not block.is_null

    patch(BlockPool, "rewrite_blocks", rewrite_blocks)


def evict_blocks_without_breaking_their_seals(patch: Patch) -> None:
    def evict_blocks(self, block_ids):
        for block_id in block_ids:
            if self.blocks[block_id].block_hash is not None:
                self._drop_hash(self.blocks[block_id])

    patch(BlockPool, "evict_blocks", evict_blocks)


def leave_invalid_blocks_hits(patch: Patch) -> None:
    def invalidate_blocks(self, blocks: Iterator[KVCacheBlock]) -> None:
        self.rewrite_blocks(blocks)

    patch(BlockPool, "invalidate_blocks", invalidate_blocks)


def leave_evicted_blocks_hits(patch: Patch) -> None:
    patch(KVCacheManager, "evict_blocks", returns(None))


# ---- peers and leases --------------------------------------------------------------------------------------------------


def do_not_fence_lost_peers(patch: Patch) -> None:
    patch(Peers, "close", lambda self, peer_id: self._peers.pop(peer_id, None) is not None)


def keep_reading_from_a_life_that_is_over(patch: Patch) -> None:
    patch(PullProtocol, "_note_incarnation", returns(None))


def end_quarantine_when_reads_are_cancelled(patch: Patch) -> None:
    real = InflightReads.abandon

    def abandon(self, load, fence_at, now):
        real(self, load, fence_at, now)
        self.quarantine.fence(load.producer)

    patch(InflightReads, "abandon", abandon)


def renew_leases_that_are_over(patch: Patch) -> None:
    def renew(self, transfer_ids, now):
        left_ms = {}
        for transfer_id in transfer_ids:
            lease = self._leases.get(transfer_id)
            if lease is not None:
                lease.expires_at = max(lease.expires_at, min(now + self._terms.renew_s, lease.last_expiry))
                heapq.heappush(self._expiries, (lease.expires_at, transfer_id))
            left_ms[transfer_id] = int(1000 * (lease.expires_at - now)) if lease is not None else 0
        return left_ms

    patch(LeaseTable, "renew", renew)


def take_every_lease_for_good(patch: Patch) -> None:
    patch(HeldLeases, "may_start_read", returns(True))


def start_reads_that_outlast_their_leases(patch: Patch) -> None:
    real = HeldLeases.may_start_read

    def may_start_read(self, transfer_id, now):
        self._margin_s = 0.0
        return real(self, transfer_id, now)

    patch(HeldLeases, "may_start_read", may_start_read)


def release_the_lease_with_its_first_reader(patch: Patch) -> None:
    real = P2PConnectorScheduler.end_use

    def end_use(self, request_id):
        ref = self._refs[request_id]
        real(self, request_id)
        if ref in self._readers:
            self.step.releases.append(ref)

    patch(P2PConnectorScheduler, "end_use", end_use)


# ---- requests between workers ------------------------------------------------------------------------------------------


def do_not_wait_for_a_worker(patch: Patch) -> None:
    real = Waiting.keep

    def keep(self, request, error, now, *, is_only_busy):
        self._restarts._worker_wait_s = 0.0
        self._restarts._is_supervised.clear()
        return real(self, request, error, now, is_only_busy=is_only_busy)

    patch(Waiting, "keep", keep)


def never_take_a_worker_that_has_failed_the_request(patch: Patch) -> None:
    real = router.dispatch.policy._in_order_of_preference

    def in_order_of_preference(workers, demand):
        yield next(real(workers, demand))

    patch(router.dispatch.policy, "_in_order_of_preference", in_order_of_preference)


def end_requests_with_their_first_loss(patch: Patch) -> None:
    real = Dispatcher._retry

    def retry(self, request, error, now, *, is_gone, is_free=False):
        self._max_retries = 0
        return real(self, request, error, now, is_gone=is_gone, is_free=is_free)

    patch(Dispatcher, "_retry", retry)


def forget_requests_of_lost_workers(patch: Patch) -> None:
    patch(Dispatcher, "on_left", returns([]))


def take_a_replaced_process_back(patch: Patch) -> None:
    patch(Namesakes, "must_wait", returns(False))


def give_a_lost_process_s_name_away_at_once(patch: Patch) -> None:
    real = Namesakes.leave

    def leave(self, key, last_seen, *, is_orderly):
        real(self, key, last_seen, is_orderly=True)

    patch(Namesakes, "leave", leave)


def keep_requests_of_a_router_that_was_replaced(patch: Patch) -> None:
    patch(Serving, "abort_of_link", returns([]))


def do_not_leave_a_hung_worker(patch: Patch) -> None:
    patch(WorkerProgress, "judge", returns(False))


def never_trust_a_worker_again_that_has_stalled(patch: Patch) -> None:
    patch(WorkerProgress, "_return", returns(None))


def let_pauses_cost_retries(patch: Patch) -> None:
    patch(Retries, "take_free", returns(False))


def never_close_a_breaker(patch: Patch) -> None:
    patch(TransportHealth, "on_probe_ended", returns(None))
    patch(TransportHealth, "count_success", returns(None))


def never_open_a_breaker(patch: Patch) -> None:
    patch(TransportHealth, "open_breaker", returns(None))
    patch(RouterMembership, "send_early", returns(None))  # as no worker did when the seed was found
    patch(TransportHealth, "count_failure", returns(None))


def never_ask_for_contents_again(patch: Patch) -> None:
    patch(ReportedContents, "needs_snapshot", lambda self, worker, num_sent: False)


MUTANTS = (
    Mutant(switch_the_seal_check_off, 0),
    Mutant(let_broken_seals_pass, 15),
    Mutant(compare_seals_without_their_generation, 15),
    Mutant(compare_seals_without_their_hash, 15),
    Mutant(leave_old_seals_in_landing_rows, 0),
    Mutant(reuse_blocks_without_a_new_generation, 0),
    Mutant(rewrite_blocks_without_breaking_their_seals, 79),
    Mutant(evict_blocks_without_breaking_their_seals, None),
    Mutant(leave_invalid_blocks_hits, 79),
    Mutant(leave_evicted_blocks_hits, None),
    Mutant(do_not_fence_lost_peers, 5),
    Mutant(keep_reading_from_a_life_that_is_over, 47),
    Mutant(end_quarantine_when_reads_are_cancelled, None),
    Mutant(renew_leases_that_are_over, None),
    Mutant(take_every_lease_for_good, 2),
    Mutant(start_reads_that_outlast_their_leases, 42),
    Mutant(release_the_lease_with_its_first_reader, 6),
    Mutant(do_not_wait_for_a_worker, 21),
    Mutant(never_take_a_worker_that_has_failed_the_request, 21),
    Mutant(end_requests_with_their_first_loss, 2),
    Mutant(forget_requests_of_lost_workers, 5),
    Mutant(take_a_replaced_process_back, 2),
    Mutant(give_a_lost_process_s_name_away_at_once, 5),
    Mutant(keep_requests_of_a_router_that_was_replaced, 11),
    Mutant(do_not_leave_a_hung_worker, 78),
    Mutant(never_trust_a_worker_again_that_has_stalled, 0),
    Mutant(let_pauses_cost_retries, 4),
    Mutant(never_close_a_breaker, 12),
    Mutant(never_open_a_breaker, 55),
    Mutant(never_ask_for_contents_again, None),  # in the first hundred no report is lost without its connection
)

# One of each kind of mistake: left out are defects that are all but another one here, and what only failed steps or the bounds
# of the quarantine would show.
_LEFT_OUT = (
    let_broken_seals_pass,
    give_a_lost_process_s_name_away_at_once,
    evict_blocks_without_breaking_their_seals,
    leave_evicted_blocks_hits,
    end_quarantine_when_reads_are_cancelled,
    take_every_lease_for_good,
    end_requests_with_their_first_loss,
    never_close_a_breaker,
)
CHOSEN = tuple(mutant for mutant in MUTANTS if mutant.apply not in _LEFT_OUT)


class Patched:
    """A mutant in place, and the real code afterwards."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant
        self._undo: list[tuple[object, str, object]] = []

    def __enter__(self) -> None:
        def patch(owner: object, name: str, value: object) -> None:
            self._undo.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)

        self._mutant.apply(patch)

    def __exit__(self, *exc: object) -> None:
        for owner, name, value in reversed(self._undo):
            setattr(owner, name, value)


def find(mutant: Mutant, seeds: range, play: Callable[[int], list[str]] = violations_of) -> tuple[int, str] | None:
    """Return the first seed that finds a mutant, and what it complains of."""
    with Patched(mutant):
        for seed in seeds:
            violations = play(seed)
            if violations:
                return seed, violations[0].strip().splitlines()[-1]
    return None


def main(all_mutants: Sequence[Mutant], num_runs: int, play: Callable[[int], list[str]]) -> None:
    """Print the table of all mutants, or of those whose names contain one of the arguments."""
    silence()
    chosen, num_found = sys.argv[1:], 0
    mutants = [mutant for mutant in all_mutants if not chosen or any(part in mutant.name for part in chosen)]
    for mutant in mutants:
        found = find(mutant, range(num_runs), play)
        num_found += found is not None
        seed, why = found if found is not None else ("-", "not found")
        print(f"{seed:>4}  {mutant.name:<50} {why[:110]}", flush=True)
    print(f"{num_found} of {len(mutants)} found within {num_runs} runs")


if __name__ == "__main__":
    main(MUTANTS, NUM_RUNS, violations_of)
