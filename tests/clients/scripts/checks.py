"""What every script here needs: where the cluster is, one example of each kind, and a runner that goes on after a failure.

The scripts run in the clients' own environment: nothing of kvferry can be imported.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

MODEL = "smollm2-135m"
BASE_URL = sys.argv[1] if len(sys.argv) > 1 else ""
API_KEY = "a-key-of-the-clients-suite"
FIRST_TURN = "Name one boat."
SECOND_TURN = "And another."


class Ticket(BaseModel):
    """What structured outputs are. Closed, because a small model does not stop to add fields."""

    model_config = ConfigDict(extra="forbid")

    place: Literal["Oslo", "Bergen"]
    seats: Literal[1, 2, 3]


WEATHER_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Oslo", "Bergen"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def run(checks: Mapping[str, Any]) -> None:
    """Run every function whose name starts with ``check_``; exit with 1 if one has failed."""
    failed = [name for name, check in checks.items() if name.startswith("check_") and not _passes(name, check)]
    sys.exit(1 if failed else 0)


def _passes(name: str, check: Callable[[], Any]) -> bool:
    try:
        result = check()
        if inspect.isawaitable(result):
            asyncio.run(_awaited(result))
    except Exception:
        traceback.print_exc(file=sys.stdout)
        print(f"FAILED {name}", flush=True)
        return False
    print(f"ok {name}", flush=True)
    return True


async def _awaited(result: Any) -> None:
    await result
