"""Deliberate defects of prefixes from other workers, looked for in plans that have them.

``python -m tests.sim.prefix_mutants`` prints for each the first of a hundred seeds that finds it, and how.
"""

from __future__ import annotations

from connectors.p2p.actions import ControlReceived
from connectors.p2p.consumer.verification import SealCheck, Verdict
from connectors.p2p.prefixes.asks import PrefixAsks
from connectors.p2p.prefixes.pins import PrefixPins
from connectors.p2p.prefixes.pulls import PrefixPulls
from connectors.p2p.prefixes.server import PrefixServer
from connectors.p2p.scheduler import P2PConnectorScheduler
from core.wire.kv import PrefixHeld
from kvferry.sim.cluster import SimCluster
from kvferry.sim.draw_plan import draw_plan
from tests.sim.protocol_mutants import Mutant, Patch, main

NUM_SEEDS = 100


def violations_of(seed: int) -> list[str]:
    """Play a seed with prefixes; a mistake of the mutant itself is no find."""
    violations = SimCluster(draw_plan(seed, peer_prefixes=True)).run().violations
    assert not any("TypeError" in each or "AttributeError" in each for each in violations), violations
    return violations


def never_free_a_pin(patch: Patch) -> None:
    patch(PrefixPins, "on_ended", lambda self, transfer_id, manager: None)


def keep_pins_from_own_requests(patch: Patch) -> None:
    patch(P2PConnectorScheduler, "free_spare_blocks", lambda self: None)


def free_pins_without_ending_their_leases(patch: Patch) -> None:
    patch(PrefixServer, "on_freed", lambda self, freed, now: [])


def switch_the_seal_check_off(patch: Patch) -> None:
    patch(SealCheck, "verdict", lambda self, seals, digests: Verdict(good=list(self._units)))


def free_pins_twice_under_pressure(patch: Patch) -> None:
    def free_all(self, manager):
        for blocks in self._pins.values():
            manager.block_pool.free_blocks(reversed(blocks))

    patch(PrefixPins, "free_all", free_all)


def wait_for_answers_for_ever(patch: Patch) -> None:
    patch(PrefixAsks, "on_timer", lambda self, event, now: [])
    patch(PrefixAsks, "on_lost", lambda self, event, now: [])


def keep_an_answer_that_came_too_late(patch: Patch) -> None:
    real = PrefixAsks.on_control

    def on_control(self, event: ControlReceived, now: float):
        if isinstance(event.message, PrefixHeld) and event.message.number not in self._open:
            return []
        return real(self, event, now)

    patch(PrefixAsks, "on_control", on_control)


def never_release_what_was_loaded(patch: Patch) -> None:
    real = P2PConnectorScheduler.end_use

    def end_use(self, request_id):
        is_prefix = self.pulls is not None and self.pulls.answer_of(request_id) is not None
        num_before = len(self.step.releases)
        real(self, request_id)
        if is_prefix:
            del self.step.releases[num_before:]

    patch(P2PConnectorScheduler, "end_use", end_use)


def fail_requests_whose_prefix_fails(patch: Patch) -> None:
    real = P2PConnectorScheduler.start_load

    def start_load(self, request, offer, blocks, num_tokens):
        real(self, request, offer, blocks, num_tokens)
        request.has_optional_load = False

    patch(P2PConnectorScheduler, "start_load", start_load)


def forget_requests_that_have_ended_no_more(patch: Patch) -> None:
    patch(PrefixPulls, "forget", lambda self, request_id: None)


MUTANTS = [
    Mutant(never_free_a_pin, 2),
    Mutant(switch_the_seal_check_off, 0),
    Mutant(free_pins_twice_under_pressure, 9),
    Mutant(keep_pins_from_own_requests, None),
    Mutant(free_pins_without_ending_their_leases, None),
    Mutant(wait_for_answers_for_ever, 0),
    Mutant(keep_an_answer_that_came_too_late, None),
    Mutant(never_release_what_was_loaded, 3),
    Mutant(fail_requests_whose_prefix_fails, 11),
    Mutant(forget_requests_that_have_ended_no_more, None),
]


if __name__ == "__main__":
    main(MUTANTS, NUM_SEEDS, violations_of)
