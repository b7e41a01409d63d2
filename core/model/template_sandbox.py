"""The sandbox in which a model's own chat template runs: it may compute, but not for long, and not build much.

Owns the bounds on a rendering: its time and the size of every value in it. A template is code of the model's and works on
data of the client's, so either may make it loop. Each turn of a loop, call, filter and intercepted operator looks at the
clock. What happens between two looks is one operation on values whose size is bounded, so a rendering ends soon after its
deadline.

Knows nothing of messages. Thread-safe: the bounds of the rendering in progress belong to its thread.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import GeneratorType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from core.errors import InvalidRequest

MAX_RENDERED = 64 << 20  # characters of a rendered conversation, and of any value on the way
MAX_RENDER_S = 10.0
_ITEM_WEIGHT = 64  # characters; an item of a list counts as so many
_MAX_WEIGHTS = 16
_LARGE = 1 << 16  # characters of a value that counts
_MAX_MADE = 1 << 30  # of large values together, since a template can keep them
_MAX_WIDTH = 1000  # of indents and columns
_MAX_INT_BITS = 8192
_WIDE_FIELD = re.compile(r"%[^a-zA-Z%]*(?:\d{4,}|\*)|\{[^{}]*[:!][^{}]*(?:\d{4,}|\{)")  # of a format string
_CONTAINERS = (list, tuple, dict)
_NO_VALUES = (Context, jinja2.Environment, nodes.EvalContext)  # what jinja2 puts before the arguments of some filters
_SIZED_FILTERS = frozenset(("batch", "center", "indent", "round", "slice", "tojson"))
_UNBOUNDED_FILTERS = ("pprint", "striptags", "urlize", "wordwrap")  # of no use in a prompt, and slow on long texts
_FILLING = ("batch", "slice")  # with a value; one that holds others would be in the result many times
_PADDING = frozenset(("center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes"))


class RenderTooSlow(InvalidRequest):
    """A template takes longer than this rendering may."""


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """An environment for chat templates with the whitespace of transformers. ``monotonic`` bounds renderings."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols])
        self._monotonic = monotonic
        self._present = _Rendering()
        self.filters["tojson"] = self._tojson
        for name in _UNBOUNDED_FILTERS:
            del self.filters[name]
        self.filters = {name: self._bounded_filter(name, function) for name, function in self.filters.items()}
        del self.globals["lipsum"]

    def template(self, source: str) -> jinja2.Template:
        """Compile a template. Raises TemplateError."""
        tree = _Watched().visit(self.parse(source))
        tree.set_environment(self)
        return self.from_string(tree)

    def render(self, template: jinja2.Template, variables: Mapping[str, Any], limit_s: float = MAX_RENDER_S) -> str:
        """Return the text.

        Raises:
            RenderTooSlow: it takes more than ``limit_s``.
            InvalidRequest: it, or a value on the way, becomes too large.
            Exception: whatever the template runs into.
        """
        present = self._present
        present.deadline, present.limit_s = self._monotonic() + limit_s, limit_s
        present.weights.clear()
        present.made = 0
        pieces, num_characters = [], 0
        try:
            for piece in template.generate(variables):
                pieces.append(piece)
                num_characters += len(piece)
                _check_size(num_characters)
                self._look()
        finally:
            present.deadline = None
            present.weights.clear()
        return "".join(pieces)

    @property
    def turn(self) -> bool:
        """True, at each turn of a loop. Raises RenderTooSlow."""
        self._look()
        return True

    def _look(self) -> None:
        """Look at the clock. Raises RenderTooSlow."""
        present = self._present
        if present.deadline is not None and self._monotonic() > present.deadline:
            raise RenderTooSlow(f"the chat template takes more than {present.limit_s:g} s for this", param="messages")

    def call(self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Call a function of the template's, if it can take no long time by itself."""
        self._look()
        method = getattr(__obj, "__wrapped__", __obj)  # jinja2 wraps str.format
        name, owner = getattr(method, "__name__", ""), getattr(method, "__self__", None)
        if isinstance(owner, str | bytes | int):
            args = self._checked_method(owner, name, args)
        elif name == "fromkeys":
            raise InvalidRequest("the chat template calls fromkeys, which is not allowed", param="messages")
        result = super().call(__context, __obj, *args, **kwargs)
        return self._weighed(result) if __obj is dict or isinstance(result, str) else result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401
        """Compute ``left operator right`` if the result cannot be large."""
        if operator == "+":
            result = left + right
            if isinstance(result, str):
                self._count(len(result))
            elif isinstance(result, _CONTAINERS):
                self._remember(result, self._weight(left) + self._weight(right))
            return result
        if operator == "%" and isinstance(left, str):
            self._check_format(left, right)
        elif operator in ("*", "**"):
            _check_product(operator, left, right)
        return self._weighed(super().call_binop(context, operator, left, right))

    def joined(self, *parts: object) -> str:
        """Return ``a ~ b``."""
        return self.concat(map(str, parts))

    def built(self, value: Any) -> Any:  # noqa: ANN401
        """Return a list, tuple or mapping that the template has built."""
        return self._weighed(value)

    def concat(self, parts: Iterable[str]) -> str:
        """Join what a block, a macro or the whole template has put out."""
        self._look()
        found = list(parts)
        self._count(sum(map(len, found)))
        return "".join(found)

    def _bounded_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            self._look()
            values = [value for value in (*args, *kwargs.values()) if not isinstance(value, _NO_VALUES)]
            self._check_filter(name, values)
            args = self._joinable(args) if name == "join" else args
            result = function(*args, **kwargs)
            if isinstance(result, GeneratorType):
                return self._watched(result)
            return self._weighed(result)

        return bounded

    def _check_filter(self, name: str, values: Sequence[Any]) -> None:
        match name:
            case _ if name in _SIZED_FILTERS:
                _check_widths(name, values)
            case "sum" if any(isinstance(value, _CONTAINERS) for value in values[1:]):
                raise InvalidRequest("the chat template sums lists, which is not allowed", param="messages")
            case "replace":
                _check_replace(values)
            case "format":
                self._check_format(str(values[0]), values[1:])

    def _joinable(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of ``join`` with its items as a list, none of them large, and all of them together neither."""
        place = next((place for place, value in enumerate(args) if isinstance(value, Iterable)), None)
        if place is None:
            return args
        items = list(self._watched(args[place])) if not isinstance(args[place], str) else list(args[place])
        separator = max((len(value) for value in args[place + 1 :] if isinstance(value, str)), default=0)
        _check_size(len(items) * separator)
        return (*args[:place], self._weighed(items), *args[place + 1 :])

    def _watched(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._look()
            yield item

    def _checked_method(self, owner: str | bytes | int, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of a method; items that are made one by one are there as a list."""
        match name:
            case _ if name in _PADDING:
                _check_widths(name, [owner, *args])
            case "replace":
                _check_replace([owner, *args])
            case "join" if isinstance(owner, str) and args:
                items = list(self._watched(args[0]))
                self._joinable((items, owner))
                return (items,)
            case "format" | "format_map":
                self._check_format(str(owner), args)
            case "translate":
                raise InvalidRequest("the chat template calls translate, which is not allowed", param="messages")
        return args

    def _check_format(self, text: str, values: Any) -> None:  # noqa: ANN401
        if _WIDE_FIELD.search(text):
            raise InvalidRequest("the chat template formats text with more than 999 columns", param="messages")
        given = values.values() if isinstance(values, dict) else values if isinstance(values, list | tuple) else (values,)
        longest = max(map(self._weight, given), default=0)
        _check_size(len(text) + (text.count("%") + text.count("{")) * longest)

    def _tojson(
        self,
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Dump JSON without the HTML escapes of jinja2's own filter."""
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        if indent is None:
            return encoder.encode(value)
        pieces, num_characters = [], 0
        for piece in encoder.iterencode(value):
            pieces.append(piece)
            num_characters += len(piece)
            _check_size(num_characters)
        return "".join(pieces)

    def _weighed(self, value: Any) -> Any:  # noqa: ANN401
        """Return a value unless it holds too much; what is in it several times counts as often."""
        if isinstance(value, str):
            self._count(len(value))
        elif isinstance(value, _CONTAINERS):
            self._remember(value, self._weight(value))
        return value

    def _remember(self, value: Any, weight: int) -> None:  # noqa: ANN401
        """Keep the weight of a container, so that one that grows item by item is not weighed again at each."""
        self._count(weight)
        weights = self._present.weights
        if len(weights) >= _MAX_WEIGHTS:
            del weights[next(iter(weights))]
        weights[id(value)] = (value, weight)

    def _count(self, size: int) -> None:
        """Count a value that has been made. Raises InvalidRequest if it is large, or many are."""
        if size > _LARGE:
            self._present.made += size
            if size > MAX_RENDERED or self._present.made > _MAX_MADE:
                raise _too_large()

    def _weight(self, value: Any) -> int:  # noqa: ANN401
        """Return about how long the text of a value is, whose items do not change; more than the limit ends it early."""
        if isinstance(value, str):
            return len(value)
        known = self._present.weights.get(id(value))
        if known is not None and known[0] is value:
            return known[1]
        weight, rest = 0, [value]
        while rest and weight <= MAX_RENDERED:
            item = rest.pop()
            if isinstance(item, str):
                weight += len(item)
                continue
            parts = [*item, *item.values()] if isinstance(item, dict) else item if isinstance(item, list | tuple) else ()
            rest.extend(parts)
            weight += _ITEM_WEIGHT * len(parts)
        return weight


class _Rendering(threading.local):
    """The rendering in progress on a thread."""

    def __init__(self) -> None:
        self.deadline: float | None = None
        self.limit_s = MAX_RENDER_S
        self.made = 0  # characters of large values
        self.weights: dict[int, tuple[Any, int]] = {}  # by id, of containers that it has built


class _Watched(NodeTransformer):
    """Lets each turn of a loop look at the clock, and weighs what a template builds."""

    def visit_For(self, node: nodes.For) -> Node:
        self.generic_visit(node)
        turn = nodes.EnvironmentAttribute("turn")
        node.body.insert(0, nodes.ExprStmt(turn).set_lineno(node.lineno))
        if node.test is not None:  # also of turns that it skips
            node.test = nodes.And(turn, node.test)
        return node

    def visit_Concat(self, node: nodes.Concat) -> Node:
        self.generic_visit(node)
        return nodes.Call(nodes.EnvironmentAttribute("joined"), node.nodes, [], None, None)

    def visit_List(self, node: nodes.List) -> Node:
        return self._built(node)

    def visit_Dict(self, node: nodes.Dict) -> Node:
        return self._built(node)

    def visit_Tuple(self, node: nodes.Tuple) -> Node:
        return self._built(node) if node.ctx == "load" else node

    def _built(self, node: nodes.Expr) -> Node:
        self.generic_visit(node)
        if all(isinstance(child, nodes.Const) for child in node.iter_child_nodes()):
            return node  # the template's own text
        return nodes.Call(nodes.EnvironmentAttribute("built"), [node], [], None, None)


class _GenerationBlocks(Extension):
    """``{% generation %}`` marks assistant text for training; when serving, its content is simply rendered."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    @staticmethod
    def _render(caller: Callable[[], str]) -> str:
        return caller()


def _check_size(num_characters: int) -> None:
    if num_characters > MAX_RENDERED:
        raise _too_large()


def _too_large() -> InvalidRequest:
    return InvalidRequest(f"the chat template makes more than {MAX_RENDERED} characters of this", param="messages")


def _check_product(operator: str, left: Any, right: Any) -> None:  # noqa: ANN401
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        if bits > _MAX_INT_BITS:
            raise InvalidRequest(f"the chat template computes a number of more than {_MAX_INT_BITS} bits", param="messages")
        return
    for repeated, times in ((left, right), (right, left)):
        if isinstance(times, int) and isinstance(repeated, str | list | tuple):
            _check_size(len(repeated) * times * (1 if isinstance(repeated, str) else _ITEM_WEIGHT))


def _check_widths(name: str, values: Iterable[Any]) -> None:
    """Refuse numbers that say how wide a text becomes, and long texts with which it is filled."""
    text, *others = values
    parts = [part for value in others for part in (value if isinstance(value, list | tuple) else [value])]
    sizes = [len(part) if isinstance(part, str) else part if isinstance(part, int) else 0 for part in parts]
    fills_with_many = name in _FILLING and any(isinstance(value, _CONTAINERS) for value in others)
    if fills_with_many or max(map(abs, sizes), default=0) > _MAX_WIDTH:
        raise InvalidRequest(f"the chat template calls {name} with more than {_MAX_WIDTH}", param="messages")
    if isinstance(text, str) and name in ("indent", "expandtabs"):
        widest = max((len(value) if isinstance(value, str) else int(value) for value in others if value is not None), default=8)
        _check_size(len(text) + (text.count("\n") + text.count("\t") + 1) * max(8, widest))


def _check_replace(values: Sequence[Any]) -> None:
    if len(values) >= 3:
        text, old, new = map(str, values[:3])
        _check_size(len(text) + text.count(old) * max(0, len(new) - len(old)))
