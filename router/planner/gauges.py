"""The gauges of the roles' load, for the planner's readers and for autoscalers of each role."""

from __future__ import annotations

from collections.abc import Callable

from core.clock import Clock
from core.wire.messages import Role
from router.dispatch.core import RouterCore
from router.metrics import RouterMetrics
from router.planner.loads import PLANNED_ROLES, RoleLoad


def add_planner_gauges(metrics: RouterMetrics, core: RouterCore, clock: Clock) -> None:
    """Have the metrics read them at every scrape, also without a planner.

    What a role without workers needs is unknown: a zero would have a scaler give up the workers that are about to return.
    """

    def watch(name: str, documentation: str, read: Callable[[RoleLoad], float], *, is_measured_at_workers: bool = True) -> None:
        def read_role(role: Role) -> Callable[[], float | None]:
            def number() -> float | None:
                load = core.planner.loads.of(role, core.membership.workers, clock.now())
                return None if is_measured_at_workers and not load.num_available else read(load)

            return number

        metrics.watch_each(name, documentation, "role", {role: read_role(role) for role in PLANNED_ROLES})

    watch("role_predicted_wait_seconds", "Shortest wait of a new request at a worker of the role.", lambda load: load.wait_s)
    watch(
        "role_inflight_tokens",
        "Tokens at the role's workers: of prompts to compute, or that decode workers may come to hold.",
        lambda load: load.inflight_tokens,
        is_measured_at_workers=False,
    )
    watch("role_demanded_workers", "Workers that the role's present demand needs.", lambda load: load.demanded)
    watch(
        "role_offered_workers",
        "Workers that the prompts which this router has sent lately keep busy; the sum over all routers counts.",
        lambda load: load.offered,
    )
    watch(
        "role_available_workers",
        "Workers of the role that take requests.",
        lambda load: load.num_available,
        is_measured_at_workers=False,
    )
    metrics.watch(
        "planner_workers",
        "Workers whose roles this router's planner may change.",
        lambda: len(core.planner.owned(core.membership.workers, clock.now())) if core.planner.is_enabled else 0,
    )
