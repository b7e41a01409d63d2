"""The form of an output, from the fields of an OpenAI body: ``response_format``, vLLM's ``structured_outputs``, ``guided_*``.

Owns the meaning of these fields and the check whether their grammar can be compiled, in a process of the router's own that is
killed at its deadline. Torch-free.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from core.errors import InvalidRequest, Overloaded
from core.grammar.checker import TOO_COMPLEX, GrammarChecker
from core.grammar.child import Setup
from core.grammar.limits import check_limits
from core.grammar.tool_calls import CallSyntax
from core.model.tokenizer import Tokenizer
from core.wire.sampling import IGNORES_END, GrammarKind, StructuredOutput
from router.openai.requests import CommonRequest, is_one_of
from router.openai.tool_choice import ToolUse, calls_form, form_or_free_calls, function_form, in_words_of_tools
from router.threads import submit

MAX_TRIALS = 256
MAX_WAIT_S = 20.0
_MAX_SEARCH_S = 5.0  # for the function at fault; each trial might take as long as that of all functions

# vLLM's name of each form, as a key of ``structured_outputs`` and after ``guided_``.
_KINDS: dict[str, GrammarKind] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
    "json_object": "json_object",
}
GUIDED = ("json", "regex", "choice", "grammar", "json_object")  # the older spelling
_SCHEMA_FIELDS = ("name", "description", "strict", "schema")  # of ``response_format.json_schema``
# Options of vLLM's that change no meaning here, or only if they have another value.
_NEUTRAL_OPTIONS: dict[str, tuple[Any, ...]] = {
    "disable_fallback": (None, True, False),
    "disable_any_whitespace": (None, False),
    "disable_additional_properties": (None, False),
    "whitespace_pattern": (None,),
}


def structured_output(request: CommonRequest) -> StructuredOutput | None:
    """Return the form that the output must have, None for free text.

    Raises:
        InvalidRequest: it is malformed, exceeds a limit, or is given twice; names the field.
    """
    forms = [(field, form) for field, form in _forms(request) if form is not None]
    if not forms:
        return None
    (field, form), *others = forms
    if others:
        raise InvalidRequest(f"{field} and {others[0][0]} both give the form of the output: leave one out", param=field)
    if request.ignore_eos:
        raise InvalidRequest(IGNORES_END, param="ignore_eos")
    try:
        check_limits(form)
    except InvalidRequest as error:
        error.param = field
        raise
    return form


def field_of_form(request: CommonRequest) -> str | None:
    """Return the field that gives the form of the output."""
    return next((field for field, form in _forms(request) if form is not None), None)


def given_form(request: CommonRequest) -> StructuredOutput | None:
    """Return the form of the output, not checked."""
    return next((form for _, form in _forms(request) if form is not None), None)


def _forms(request: CommonRequest) -> list[tuple[str, StructuredOutput | None]]:
    guided = [(f"guided_{name}", _form(name, getattr(request, f"guided_{name}"), f"guided_{name}")) for name in GUIDED]
    return [
        ("response_format", _from_response_format(request.response_format)),
        ("structured_outputs", _from_structured_outputs(request.structured_outputs)),
        *guided,
    ]


def _from_response_format(value: object) -> StructuredOutput | None:
    if value is None:
        return None
    field = "response_format"
    if not isinstance(value, dict):
        raise InvalidRequest("response_format must be an object", param=field)
    match value.get("type"):
        case "text":
            _check_fields(value, ("type",), field, "text")
            return None
        case "json_object":
            _check_fields(value, ("type",), field, "json_object")
            return StructuredOutput(kind="json_object")
        case "json_schema":
            described = value.get("json_schema")
            schema = described.get("schema") if isinstance(described, dict) else None
            if not isinstance(described, dict) or not isinstance(schema, dict | bool):
                raise InvalidRequest("response_format.json_schema.schema must be a JSON schema", param=field)
            _check_fields(value, ("type", "json_schema"), field, "json_schema")
            _check_fields(described, _SCHEMA_FIELDS, f"{field}.json_schema", "json_schema")
            return StructuredOutput(kind="json_schema", value=_text(schema))
        case "structural_tag":
            return StructuredOutput(kind="structural_tag", value=_text(value))
        case other:
            allowed = "text, json_object, json_schema, structural_tag"
            raise InvalidRequest(f"response_format.type must be one of {allowed}, got {other!r}", param=field)


def _check_fields(value: dict[str, Any], known: tuple[str, ...], place: str, kind: str) -> None:
    """Refuse fields that a ``response_format`` of this kind does not have; null is none."""
    unknown = next((name for name, one in value.items() if one is not None and name not in known), None)
    if unknown is not None:
        fix = "use type json_schema" if unknown == "schema" else "leave it out"
        raise InvalidRequest(f"{place}.{unknown} is no field of type {kind}: {fix}", param="response_format")


def _from_structured_outputs(value: object) -> StructuredOutput | None:
    if value is None:
        return None
    field = "structured_outputs"
    if not isinstance(value, dict):
        raise InvalidRequest("structured_outputs must be an object", param=field)
    for name, one in value.items():
        if name not in _KINDS and name not in _NEUTRAL_OPTIONS:
            raise InvalidRequest(f"structured_outputs has no field {name!r}", param=field)
        if not is_one_of(one, _NEUTRAL_OPTIONS.get(name, (one,))):
            raise InvalidRequest(f"structured_outputs.{name} is not supported: leave it out", param=field)
    given = {name: one for name, one in value.items() if name in _KINDS and one is not None and one is not False}
    if len(given) != 1:
        raise InvalidRequest(f"structured_outputs needs exactly one of {', '.join(_KINDS)}", param=field)
    ((name, one),) = given.items()
    return _form(name, one, f"structured_outputs.{name}")


def _form(name: str, value: object, field: str) -> StructuredOutput | None:
    """Return the form by its name of vLLM's."""
    if value is None or (name == "json_object" and value is False):
        return None
    kind = _KINDS[name]
    if kind == "json_object":
        if value is not True:
            raise InvalidRequest(f"{field} must be true or false", param=field)
        return StructuredOutput(kind=kind)
    if kind in ("regex", "grammar"):
        if not isinstance(value, str):
            raise InvalidRequest(f"{field} must be a string", param=field)
        return StructuredOutput(kind=kind, value=value)
    is_text = isinstance(value, str) and kind != "choice"
    return StructuredOutput(kind=kind, value=value if is_text else _text(value))  # type: ignore[arg-type]


def _text(value: object) -> str:
    return msgspec.json.encode(value).decode()


@dataclass(slots=True, eq=False)
class _Trial:
    """One grammar that waits for the thread or is compiled, for all requests that have it."""

    output: StructuredOutput
    begun: asyncio.Future[asyncio.Future[None]]  # ends with the thread's work
    num_requests: Counter[int] = field(default_factory=Counter)  # that wait for it, by tenant; it counts for the first one

    @property
    def tenant(self) -> int:
        """The tenant for which it counts; 0 if all of its requests have gone."""
        return next(iter(self.num_requests), 0)


class _Turns:
    """Trials that have not begun, in the order of their requests. Tenants take turns."""

    def __init__(self) -> None:
        self._of_tenants: OrderedDict[int, dict[_Trial, None]] = OrderedDict()

    def add(self, tenant: int, trial: _Trial) -> None:
        """Add a trial for one of its tenants, if it is not there for that one."""
        self._of_tenants.setdefault(tenant, {})[trial] = None

    def drop(self, trial: _Trial) -> None:
        """Remove a trial for all of its tenants."""
        for trials in self._of_tenants.values():
            trials.pop(trial, None)

    def take(self) -> _Trial | None:
        """Remove the first trial of the next tenant and return it; None if there is none."""
        while self._of_tenants:
            tenant, trials = self._of_tenants.popitem(last=False)
            if trials:
                trial = next(iter(trials))
                self._of_tenants[tenant] = trials
                self.drop(trial)
                return trial
        return None


class GrammarGate:
    """Refuses grammars that no worker could compile. Its process is started by the first one.

    Requests of one grammar share its trial, also one that ends without an answer; a trial that nobody waits for is left out.
    At most ``MAX_TRIALS`` are open; in a full room the tenants have equal shares. ``max_wait_s`` bounds their wait, without the
    pauses of the router, whose length so far ``paused_s`` returns, in seconds.
    """

    def __init__(
        self, tokenizer: Tokenizer, max_wait_s: float = MAX_WAIT_S, paused_s: Callable[[], float] = lambda: 0.0
    ) -> None:
        def setup() -> Setup:
            return Setup(tokenizer.backend.to_str(), tokenizer.vocab_size, tuple(tokenizer.eos_token_ids))

        self._tokenizer = tokenizer
        self._checker = GrammarChecker(setup)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvferry-grammar")
        self._trials: dict[StructuredOutput, _Trial] = {}
        self._turns = _Turns()
        self._checking: asyncio.Task[None] | None = None
        self._max_wait_s = max_wait_s
        self._paused_s = paused_s

    async def check(self, output: StructuredOutput | None, field: str | None, tenant: int = 0) -> None:
        """Compile a grammar on trial; answers are kept. ``tenant`` names the API key, 0 if keys do not share fairly.

        Raises:
            InvalidRequest: it is malformed, not supported, or too complex; names the field and the part.
            Overloaded: too many others wait, or the machine is too busy to tell.
        """
        if output is None:
            return
        try:
            if not self._checker.check_kept(output):
                await self._try(output, tenant)
        except InvalidRequest as error:  # others may wait for the same one
            raise InvalidRequest(error.message, param=field) from None

    async def check_with_calls(
        self,
        form: StructuredOutput | None,
        field: str | None,
        tools: ToolUse | None,
        syntaxes: Sequence[CallSyntax],
        tenant: int = 0,
    ) -> StructuredOutput | None:
        """Check the form of an output, and return it with the calls that the model may choose; ``syntaxes`` say how it calls.

        Raises:
            InvalidRequest: no worker could compile it, or no grammar has this model's format of calls; names the field.
            Overloaded: as ``check``.
        """
        if tools is not None and tools.form is not None:
            await self._check_calls(tools.form, tools, tenant)
            return tools.form
        await self.check(form, field, tenant)
        if form is None or field is None or tools is None:
            return form
        calls = calls_form(tools)
        found = form_or_free_calls(form, field, tools, syntaxes, self._tokenizer.special_tokens)
        await self._check_calls(calls, tools, tenant)
        await self.check(found, field, tenant)
        return found

    async def _check_calls(self, calls: StructuredOutput, tools: ToolUse, tenant: int) -> None:
        try:
            await self.check(calls, "tools", tenant)
        except InvalidRequest as error:
            raise await self._of_function_at_fault(error, tools, tenant) from None

    async def _of_function_at_fault(self, error: InvalidRequest, tools: ToolUse, tenant: int) -> InvalidRequest:
        """Return why calls cannot be compiled, of the first function whose own schema cannot be either, if one is found."""
        if tools.named:
            return in_words_of_tools(error, tools, tools.named)
        names = list(tools.schemas)
        if TOO_COMPLEX in error.message:
            return in_words_of_tools(error, tools, names[0] if len(names) == 1 else "")
        now = asyncio.get_running_loop().time
        end = now() + _MAX_SEARCH_S
        for name in names:
            if now() >= end:
                break
            try:
                await self.check(function_form(tools, name), "tools", tenant)
            except InvalidRequest as own:
                return in_words_of_tools(own, tools, name)
            except Overloaded:
                break  # what is known of all is an answer
        return in_words_of_tools(error, tools)

    async def _try(self, output: StructuredOutput, tenant: int) -> None:
        trial = self._trials.get(output)
        if trial is None:
            self._make_room(tenant)
            trial = self._trials[output] = _Trial(output, asyncio.get_running_loop().create_future())
        if not trial.begun.done():
            self._turns.add(tenant, trial)
        if self._checking is None or self._checking.done():
            self._checking = asyncio.create_task(self._check_in_turn())
        trial.num_requests[tenant] += 1
        try:
            await self._wait_for_turn(trial)
            work = trial.begun.result()
            await asyncio.wait((work,))  # the checker ends it in time
        finally:
            trial.num_requests -= Counter((tenant,))
            if not trial.num_requests and not trial.begun.done():
                self._turns.drop(trial)
                del self._trials[output]
        work.result()

    async def _wait_for_turn(self, trial: _Trial) -> None:
        now = asyncio.get_running_loop().time
        end = now() + self._max_wait_s - self._paused_s()
        while not trial.begun.done():
            left_s = end + self._paused_s() - now()
            if left_s <= 0:
                raise Overloaded("the grammars before this one took too long to check: try again later")
            await asyncio.wait((trial.begun,), timeout=left_s)

    def _make_room(self, tenant: int) -> None:
        """Make room for a grammar of a tenant: in a full room the last one that only the tenant with most waits for gives way.

        Raises:
            Overloaded: the tenant has its share already, or others wait for all grammars of the tenant with most.
        """
        if len(self._trials) < MAX_TRIALS:
            return
        nums = Counter(trial.tenant for trial in self._trials.values() if trial.num_requests)
        ((most, _),) = nums.most_common(1)
        waiting = (trial for trial in reversed(self._trials.values()) if not trial.begun.done())
        last = next((trial for trial in waiting if trial.num_requests.keys() == {most}), None)
        # Of the grammars that somebody waits for: a tenant below its share of them has fewer than the one with most.
        if last is None or nums[tenant] >= nums.total() // len({tenant, *nums}):
            own = f", {nums[tenant]} of this API key" if tenant else ""
            raise Overloaded(f"{MAX_TRIALS} grammars wait to be checked already{own}: try again later")
        self._refuse(last, Overloaded("grammars of other API keys have taken the place of this one: try again later"))

    def _refuse(self, trial: _Trial, error: Overloaded) -> None:
        """Fail the requests of a trial that has not begun."""
        self._turns.drop(trial)
        del self._trials[trial.output]
        trial.begun.set_exception(error)
        trial.begun.exception()  # its requests may all have gone

    async def _check_in_turn(self) -> None:
        while (trial := self._turns.take()) is not None:
            try:
                work = submit(self._thread, partial(self._checker.check, trial.output))
            except Overloaded as error:
                self._refuse(trial, error)
                continue
            trial.begun.set_result(work)
            await asyncio.wait((work,))
            del self._trials[trial.output]
            if not work.cancelled():
                work.exception()  # its requests may all have gone

    def close(self) -> None:
        """End the process and the thread, and the wait of all requests."""
        if self._checking is not None:
            self._checking.cancel()
        for trial in self._trials.values():
            trial.begun.cancel()
        self._checker.close()
        self._thread.shutdown(wait=False, cancel_futures=True)
