"""Workers of simulated clusters change their roles among other faults, and deliberate defects of that are found."""

from __future__ import annotations

import pytest

from core.worker.role_switch import RoleSwitch
from core.worker.switchable import SwitchableHandler
from kvferry.sim.faults import Fault
from kvferry.sim.role_history import RoleHistory
from kvferry.sim.runs import run_seed, run_seeds
from router.planner.planner import Planner

pytestmark = pytest.mark.slow

FAULTS = (Fault.SWITCH, Fault.CRASH, Fault.ROUTER_CRASH, Fault.FREEZE, Fault.CUT, Fault.PARTITION, Fault.DRAIN)


def found(seeds, kinds):
    """Return the first violation of some seeds; None if there is none."""
    return next((result.violations[0] for result in (run_seed(seed, kinds) for seed in seeds) if not result.is_good), None)


def test_roles_change_by_command_and_by_planners_among_faults():
    summary = run_seeds(range(500, 512), FAULTS)
    assert not summary.failures, [(failure.seed, failure.violations[0]) for failure in summary.failures]
    assert summary.happened["role_switches"] > 10
    assert summary.happened["planned_switches"] > 0


def test_what_a_worker_has_leased_is_read_after_it_has_changed_its_role(monkeypatch):
    """Without other faults no handoff fails: only prompts that find no prefill worker are computed elsewhere."""
    leased, log = [], RoleSwitch.log

    def log_and_count(self, reason, num_of_former_role, num_leased_blocks):
        leased.append(num_leased_blocks)
        log(self, reason, num_of_former_role, num_leased_blocks)

    monkeypatch.setattr(RoleSwitch, "log", log_and_count)
    summary = run_seeds(range(500, 520), (Fault.SWITCH,))
    assert not summary.failures
    assert sum(num_blocks > 0 for num_blocks in leased) > 5
    outcomes = {name for name in summary.happened if name.startswith(("fallback_", "load_"))}
    assert outcomes <= {"load_ok", "fallback_no_prefill"}


@pytest.mark.full
@pytest.mark.parametrize("start", range(10_000, 12_000, 200))
def test_more_roles_change_among_faults(start):
    summary = run_seeds(range(start, start + 200), FAULTS)
    assert not summary.failures, [(failure.seed, failure.violations[0]) for failure in summary.failures]


# ---- defects -----------------------------------------------------------------------------------------------------------


def test_finds_a_registration_that_is_sent_once(monkeypatch):
    monkeypatch.setattr(RoleSwitch, "is_known_at", lambda self, link: True)
    assert "for" in (found(range(500, 560), (Fault.SWITCH, Fault.CUT, Fault.PARTITION)) or "")


def test_finds_workers_that_drop_what_they_took_in_a_former_role(monkeypatch):
    """Outputs go to the handler of the role that was taken last, as if each role had a process of its own."""
    take, outputs, latest = RoleSwitch.take, SwitchableHandler.on_outputs, []

    def take_and_tell(self, *args, **kwargs):
        take(self, *args, **kwargs)
        latest.append(self.role)

    def on_outputs(self, found, now):
        if not latest:
            return outputs(self, found, now)
        return (self._prefill if latest[-1] == "prefill" else self._decode).on_outputs(found, now)

    monkeypatch.setattr(RoleSwitch, "take", take_and_tell)
    monkeypatch.setattr(SwitchableHandler, "on_outputs", on_outputs)
    assert found(range(500, 520), (Fault.SWITCH,))


def test_finds_planners_that_switch_whatever_they_see(monkeypatch):
    """Workers obey every planner, and each planner counts all workers."""
    monkeypatch.setattr(RoleSwitch, "_check_order", lambda self, link, message, now: None)
    monkeypatch.setattr(Planner, "_owns", lambda self, worker, now: worker.facts.can_switch_role and bool(worker.heartbeat))
    monkeypatch.setattr("router.planner.planner.choose", _choose_anything)
    assert "the last" in (found(range(500, 560), (Fault.SWITCH,)) or "")


def _choose_anything(loads, owned, fixed, limits):
    from router.planner.choice import Stay, Switch

    worker = next((each for each in owned if each.role in ("prefill", "decode")), None)
    return Stay("") if worker is None else Switch(worker, "decode" if worker.role == "prefill" else "prefill", "")


# ---- what the oracle knows ---------------------------------------------------------------------------------------------


def test_the_history_knows_the_roles_of_every_period():
    times = iter((1.0, 3.0, 7.0))
    history = RoleHistory(lambda: next(times))
    for role in ("prefill", "decode", "decode", "aggregated"):
        history.note("w", 1, role)
    assert history.between("w", "prefill", 0.0, 2.0) == {"prefill"}
    assert history.between("w", "prefill", 2.0, 4.0) == {"prefill", "decode"}
    assert history.between("w", "prefill", 4.0, 6.0) == {"decode"}
    assert history.between("w", "prefill", 8.0, 9.0) == {"aggregated"}
    assert history.between("unknown", "decode", 0.0, 9.0) == {"decode"}


def test_the_history_ignores_a_process_that_was_replaced():
    history = RoleHistory(lambda: 1.0)
    for incarnation, role in ((1, "prefill"), (2, "prefill"), (1, "decode")):
        history.note("w", incarnation, role)
    assert history.between("w", "prefill", 0.0, 2.0) == {"prefill"}


def test_a_planner_that_takes_the_last_worker_of_a_role_is_found():
    history = RoleHistory(lambda: 0.0)
    for name, role in (("a", "prefill"), ("b", "decode"), ("b", "prefill")):
        history.note(name, 1, role)
    history.note_planned("b", 1)
    history.note("c", 1, "decode")
    history.note("c", 1, "aggregated")  # by command, at the same moment: the planner could not know
    history.note("b", 1, "decode")
    history.note("b", 1, "prefill")
    history.note_planned("b", 1)
    assert history.find_abandoned() == ["b: a planner made the last decode worker prefill"]
