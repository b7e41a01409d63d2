"""The role of a worker while it runs: its registration, who may change it, and which routers know the present one.

A switch is a new registration. The engine, its KV pool, its prefix cache and its leases know no roles, and a worker that can
switch has the handlers of all of them (``core.worker.switchable``), so requests of the former role run to their end beside new
ones. A router that does not know of the switch yet may send another request of the former role; it is served.

Of several routers with a planner one may change the role: the first that asks, for as long as it is heard. It counts, for its
least number of workers of a role, only workers that it may switch, so two planners that see different workers, or that take
turns, cannot together remove the last one. A ``SwitchRole`` names the worker's life, its number of switches and a recent
heartbeat, so one that a crash, another switch or a delay has overtaken is refused. Callers pass the time, in seconds.
"""

from __future__ import annotations

import logging
from collections import deque

import msgspec

from core.errors import RoleSwitchRefused
from core.log import event
from core.wire.messages import ErrorInfo, Heartbeat, Register, Registered, RegisterEncoder, Role, SwitchRefused, SwitchRole

logger = logging.getLogger(__name__)

_NUM_REMEMBERED = 256  # heartbeats
_FRESH_SHARE = 0.5  # of the time after which a silent planner loses its right: a switch that comes later is refused
_VLLM_CONNECTOR = "vllm"

SWITCH_ROLES: tuple[Role, ...] = ("prefill", "decode", "aggregated")


class RoleSwitch:
    """The registration of one worker. ``planner`` is the link of the router that may change its role; "" = none."""

    def __init__(self, registration: Register | RegisterEncoder) -> None:
        self.registration = registration
        self.planner = ""
        self._before = self.role
        self._renewed_at = 0.0
        self._right_s = 0.0  # how long the right lasts without renewal
        self._known: dict[str, int] = {}  # by link, the number of switches that its router has acknowledged
        self._heartbeats: deque[tuple[int, float]] = deque(maxlen=_NUM_REMEMBERED)  # (number, when it was sent)

    @property
    def role(self) -> Role:
        """The present role."""
        return self.registration.role if isinstance(self.registration, Register) else "encode"

    @property
    def num_switches(self) -> int:
        """How often the role has changed since the start."""
        return self.registration.num_switches if isinstance(self.registration, Register) else 0

    # ---- routers -----------------------------------------------------------------------------------------------------

    def on_registered(self, link: str, message: Registered, now: float) -> None:
        """Record what a router knows of this worker, and whether it asks for the right to change its role."""
        self._known[link] = message.num_switches
        if not isinstance(self.registration, Register) or not self.registration.can_switch_role:
            return
        if not message.plans_roles:
            self._end_right(link)
        elif self.planner in ("", link) or not self.is_planner(self.planner, now):
            self.planner, self._renewed_at = link, now
            self._right_s = message.heartbeat_timeout_ms / 1e3

    def on_lost(self, link: str) -> None:
        """A router is gone, or does not know this worker any more."""
        self._known.pop(link, None)
        self._end_right(link)

    def _end_right(self, link: str) -> None:
        if self.planner == link:
            self.planner = ""

    def is_planner(self, link: str, now: float) -> bool:
        """Return True if this router may change the role now."""
        return bool(link) and link == self.planner and now - self._renewed_at < self._right_s

    def is_known_at(self, link: str) -> bool:
        """Return False if the router has yet to learn the present role."""
        return self._known.get(link, 0) >= self.num_switches

    def sign(self, heartbeat: Heartbeat, link: str, num_of_former_role: int, now: float) -> Heartbeat:
        """Return a heartbeat that is sent now with the state of the role; unchanged for a worker that cannot switch."""
        if not isinstance(self.registration, Register) or not self.registration.can_switch_role:
            return heartbeat
        number = self._heartbeats[-1][0] + 1 if self._heartbeats else 1
        self._heartbeats.append((number, now))
        return msgspec.structs.replace(
            heartbeat,
            number=number,
            num_switches=self.num_switches,
            num_of_former_role=num_of_former_role,
            is_planner=self.is_planner(link, now),
        )

    # ---- switches ----------------------------------------------------------------------------------------------------

    def order(self, link: str, message: SwitchRole, now: float, *, is_leaving: bool) -> SwitchRefused | None:
        """Take the role that a router's planner has chosen; return the answer if it is refused."""
        ours = self.registration
        try:
            self._check_order(link, message, now)
            self.take(message.role, message.incarnation, message.num_switches, is_leaving=is_leaving)
        except RoleSwitchRefused as error:
            logger.info(event("role_switch_refused", router=link, role=message.role, message=error.message))
            return SwitchRefused(engine_id=ours.engine_id, incarnation=ours.incarnation, error=ErrorInfo.of(error))
        return None

    def _check_order(self, link: str, message: SwitchRole, now: float) -> None:
        name = self.registration.engine_id
        if not self.is_planner(link, now):
            raise RoleSwitchRefused(f"{name}: another router plans its role, or none does")
        sent_at = dict(self._heartbeats).get(message.heartbeat)
        if sent_at is None or now - sent_at > _FRESH_SHARE * self._right_s:
            raise RoleSwitchRefused(f"{name}: the switch was decided too long ago")

    def take(
        self, role: Role, incarnation: int | None = None, num_switches: int | None = None, *, is_leaving: bool = False
    ) -> None:
        """Take a role; with ``incarnation`` and ``num_switches``, only if this is that life and that role still holds.

        Raises:
            RoleSwitchRefused: nothing has changed.
        """
        registration, name = self.registration, self.registration.engine_id
        if is_leaving:
            raise RoleSwitchRefused(f"{name} is leaving")
        if incarnation is not None and incarnation != registration.incarnation:
            raise RoleSwitchRefused(f"{name} is another process than the one that should switch: it has restarted since")
        if not isinstance(registration, Register):
            raise RoleSwitchRefused(f"{name} embeds images, which no other role does: start another worker")
        if registration.connector == _VLLM_CONNECTOR:
            raise RoleSwitchRefused(f"{name} is the agent of a vLLM engine, whose role is part of its start: start another one")
        if not registration.can_switch_role:
            raise RoleSwitchRefused(f"{name} was started for one role: start it with worker.can_switch_role = true")
        if num_switches is not None and num_switches != registration.num_switches:
            raise RoleSwitchRefused(f"{name} has switched to {registration.role} since")
        if role not in SWITCH_ROLES:
            raise RoleSwitchRefused(f"{name} cannot become {role}; allowed: {', '.join(SWITCH_ROLES)}")
        if role == registration.role:
            raise RoleSwitchRefused(f"{name} is {role} already")
        self._before = registration.role
        self.registration = msgspec.structs.replace(registration, role=role, num_switches=registration.num_switches + 1)

    def log(self, reason: str, num_of_former_role: int, num_leased_blocks: int) -> None:
        """Write the one line of a switch."""
        fields = {"engine_id": self.registration.engine_id, "before": self._before, "role": self.role, "reason": reason}
        logger.info(event("role_switched", **fields, requests=num_of_former_role, leased_blocks=num_leased_blocks))
