"""``/role`` of a worker's operations port: its role, and the command to take another one.

Owns the query and the answers; ``core.worker.state`` decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus

import msgspec

from core.errors import RoleSwitchRefused
from core.wire.messages import Role
from core.worker.actions import Action
from core.worker.ops_http import OpsResponse
from core.worker.state import WorkerState

_EXPECTED = "?to=prefill|decode|aggregated, and optionally &incarnation=HEX&num_switches=N as GET /role shows them"


class _RoleQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    to: Role
    incarnation: str | None = None
    num_switches: int | None = None


def show_role(state: WorkerState) -> OpsResponse:
    """Return which role the worker has, and what is left of a former one."""
    report = {
        "engine_id": state.roles.registration.engine_id,
        "incarnation": f"{state.roles.registration.incarnation:x}",
        "role": state.roles.role,
        "num_switches": state.roles.num_switches,
        "requests_of_former_role": state.num_of_former_role,
        "leased_blocks": state.num_leased_blocks,
    }
    return OpsResponse.of_json(HTTPStatus.OK, report)


def switch_role(
    state: WorkerState, query: Mapping[str, str], now: float, perform: Callable[[Sequence[Action]], None]
) -> OpsResponse:
    """Take the role that the query names; with ``incarnation`` and ``num_switches``, only if they still hold."""
    try:
        wanted = msgspec.convert(dict(query), _RoleQuery, strict=False)
        incarnation = int(wanted.incarnation, 16) if wanted.incarnation is not None else None
    except ValueError as error:
        return OpsResponse.of_json(HTTPStatus.BAD_REQUEST, {"error": f"{error}; expected {_EXPECTED}"})
    try:
        perform(state.switch_role(wanted.to, now, incarnation, wanted.num_switches))
    except RoleSwitchRefused as error:
        return OpsResponse.of_json(error.http_status, {"error": error.message})
    return show_role(state)
