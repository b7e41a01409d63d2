"""What reaches an engine from outside between two steps, and what it does with it.

Owns the types of these messages and their effect. Knows no threads: ``core.engine.thread`` keeps the queue in a worker, the
simulation keeps its own.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from core.engine.core import Engine
from core.errors import KVFerryError, RequestError
from core.log import event
from core.request import EngineCoreOutput, NewRequest
from core.wire.messages import ErrorInfo

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AddRequests:
    """New requests."""

    requests: Sequence[NewRequest]


@dataclass(frozen=True, slots=True)
class AbortRequests:
    """Nobody needs these requests any more."""

    request_ids: Sequence[str]


@dataclass(frozen=True, slots=True)
class Wake:
    """A connector has something to report."""


EngineMessage = AddRequests | AbortRequests | Wake


def take_in(engine: Engine, message: EngineMessage) -> list[EngineCoreOutput]:
    """Apply a message; return the only outputs of the requests that are refused."""
    match message:
        case AddRequests(requests):
            return [refusal for new in requests if (refusal := _add(engine, new)) is not None]
        case AbortRequests(request_ids):
            engine.abort_requests(request_ids)
        case Wake():
            engine.wake()
    return []


def _add(engine: Engine, new: NewRequest) -> EngineCoreOutput | None:
    """Add a request; return its only output if it is refused or malformed, which must not affect other requests."""
    try:
        engine.add_request(new)
    except RequestError as error:
        refusal: KVFerryError = error
    except Exception as error:
        logger.exception(event("request_not_added", request_id=new.request_id, error=repr(error)))
        refusal = KVFerryError(f"the request could not be added: {error!r}")
    else:
        return None
    return EngineCoreOutput(new.request_id, [], finish_reason="error", error=ErrorInfo.of(refusal))
