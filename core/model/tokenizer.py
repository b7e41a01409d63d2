"""Text to token ids and back, and chat templates. Torch-free: the router runs it.

Owns encoding, decoding and what a model's own (untrusted) Jinja template is given; it runs in
``core.model.template_sandbox``. Knows nothing of streaming (``core.model.detokenizer``) or of the origin of files
(``core.model.hub``). Thread-safe: it holds no state of any request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any, NoReturn

import jinja2.meta
from jinja2 import Template
from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers.decoders import ByteLevel

from core.errors import ConfigError, InvalidRequest
from core.model.hub import ModelFiles
from core.model.template_sandbox import MAX_RENDER_S, TemplateSandbox

_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
_SHORT = 4096  # characters, or tokens; at most some ten milliseconds
_NO_ARGS: Mapping[str, object] = MappingProxyType({})
_CONTINUE_MARK = "\ufdd0kvferry-continue\ufdd1"  # noncharacters: no message contains them by accident

Message = Mapping[str, Any]
WallClock = Callable[[], datetime]


def read_tokenizer(files: ModelFiles) -> bytes:
    """Return what ``parse_tokenizer`` needs, for those who need it much later, when there may be no descriptor for the file.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        return files.tokenizer_file.read_bytes()
    except OSError as error:
        raise _unreadable(files, error.strerror) from error


def parse_tokenizer(files: ModelFiles, content: bytes) -> BackendTokenizer:
    """Return the tokenizer of the library, which cuts and fills nothing.

    Raises:
        ConfigError: it is not the content of a ``tokenizer.json``.
    """
    try:
        backend = BackendTokenizer.from_buffer(content)
    except Exception as error:  # the library raises bare Exception for every kind of bad file
        raise _unreadable(files, error) from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _unreadable(files: ModelFiles, reason: object) -> ConfigError:
    return ConfigError(f"{files.tokenizer_file} cannot be read: {reason}", param="model.name")


class Tokenizer:
    """The tokenizer of one model.

    ``template`` is the text of its chat template, ``tool_template`` of that for requests with tools, which is the same in most
    models; ``template_variables`` and ``tool_template_variables`` are what they read. ``unknown_template_tokens``: special
    tokens that they read and the model's files do not mention, which are rendered as nothing.
    ``wall_clock`` serves templates that print the date; ``monotonic`` bounds the time of rendering.

    Raises: ConfigError if ``tokenizer.json`` cannot be read or the chat template does not compile.
    """

    def __init__(
        self, files: ModelFiles, wall_clock: WallClock = datetime.now, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        backend = self.backend = parse_tokenizer(files, read_tokenizer(files))
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.eos_token_ids = files.eos_token_ids
        self._named_tokens = _special_tokens(files.tokenizer_config)
        added = backend.get_added_tokens_decoder().items()
        self.special_tokens = {token.content: token_id for token_id, token in added if token.special}
        self.special_token_ids = frozenset(self.special_tokens.values())
        self.is_byte_level = isinstance(backend.decoder, ByteLevel)  # each token is a fixed run of bytes
        self.byte_of_letter = _byte_level_alphabet()
        self.byte_level_pieces: dict[int, str | bytes] = {}  # by id, as far as a stream has met them; one per token at most
        self._sandbox = _sandbox(wall_clock, monotonic)
        self.template = files.chat_template or ""
        self.tool_template = files.tool_template or self.template
        self._templates = {text: self._compiled(text) for text in (self.template, self.tool_template) if text}
        self.template_variables = self._variables(self.template)
        self.tool_template_variables = self._variables(self.tool_template)
        named = self.template_variables | self.tool_template_variables
        self.unknown_template_tokens = [
            name for name in _SPECIAL_TOKEN_NAMES if name in named and name not in files.tokenizer_config
        ]

    def _compiled(self, template: str) -> Template:
        try:
            return self._sandbox.template(template)
        except TemplateError as error:
            raise ConfigError(f"the model's chat template does not compile: {error}", param="model.name") from error

    def _variables(self, template: str) -> frozenset[str]:
        return frozenset(jinja2.meta.find_undeclared_variables(self._sandbox.parse(template)))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of ``text``; special tokens written in the text become their ids.

        ``add_special_tokens`` adds the tokens of the model's own post-processor (usually bos). Text rendered by a chat template
        contains them already. The interpreter's lock is free while a long text is encoded, which only batches allow.
        """
        if len(text) <= _SHORT:
            ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        else:
            ids = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ``token_ids``; ids outside the vocabulary give nothing, broken UTF-8 gives U+FFFD.

        The interpreter's lock is free while many are decoded.
        """
        if len(token_ids) <= _SHORT:
            text: str = self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        else:
            (text,) = self.backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        return text

    def token(self, token_id: int) -> str | None:
        """Return a token as the vocabulary spells it, or None for an id outside it."""
        spelled: str | None = self.backend.id_to_token(token_id)
        return spelled

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_args: Mapping[str, object] = _NO_ARGS,
        limit_s: float = MAX_RENDER_S,
    ) -> str:
        """Render a conversation to the prompt text; encode it with ``add_special_tokens=False``.

        ``continue_final_message`` leaves the last message open, so that the model continues it. ``template_args`` (``tools``,
        ``documents``, ...) are passed to the template unchanged; with ``tools`` it is ``tool_template``.

        Raises:
            InvalidRequest: there is no template, it refuses the conversation or makes too much of it, or arguments contradict.
            RenderTooSlow: it takes more than ``limit_s``.
        """
        template = self._templates.get(self.template if template_args.get("tools") is None else self.tool_template)
        if template is None:
            raise InvalidRequest("this model has no chat template; use the completions endpoint", param="messages")
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
            )
        conversation = _mark_final(messages) if continue_final_message else list(messages)
        variables = {"tools": None, "documents": None, **self._named_tokens, **template_args}
        variables |= {"messages": conversation, "add_generation_prompt": add_generation_prompt}
        try:
            text = self._sandbox.render(template, variables, limit_s)
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise InvalidRequest(f"the chat template refused the messages: {error}", param="messages") from error
        return _cut_at_mark(text) if continue_final_message else text


def _sandbox(wall_clock: WallClock, monotonic: Callable[[], float]) -> TemplateSandbox:
    """Return a sandbox with the filters and globals that transformers gives a chat template."""
    sandbox = TemplateSandbox(monotonic)
    sandbox.globals["raise_exception"] = _raise_exception
    sandbox.globals["strftime_now"] = lambda layout: wall_clock().strftime(layout)
    return sandbox


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _byte_level_alphabet() -> dict[str, int]:
    """Return {letter: byte} of byte-level BPE: printable Latin-1 stands for itself, the rest starts at U+0100 (GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    letters.update({chr(0x100 + number): byte for number, byte in enumerate(others)})
    return letters


def _special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Return {"bos_token": "<s>", ...} of the tokens that the config names, as strings or as serialized AddedTokens."""
    found = {}
    for name in _SPECIAL_TOKEN_NAMES:
        token = tokenizer_config.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            found[name] = token
    return found


def _mark_final(messages: Sequence[Message]) -> list[Message]:
    """Append the mark to the last text of the last message, so that the rendered text can be cut there."""
    final = dict(messages[-1]) if messages else {}
    content = final.get("content")
    if isinstance(content, str):
        final["content"] = content + _CONTINUE_MARK
    elif isinstance(content, list) and content and isinstance(content[-1], dict) and isinstance(content[-1].get("text"), str):
        final["content"] = [*content[:-1], {**content[-1], "text": content[-1]["text"] + _CONTINUE_MARK}]
    else:
        raise InvalidRequest("continue_final_message needs a last message that ends with text", param="messages")
    return [*messages[:-1], final]


def _cut_at_mark(text: str) -> str:
    rendered, mark, _ = text.rpartition(_CONTINUE_MARK)
    if not mark:
        raise InvalidRequest("the chat template drops the final message: it cannot be continued", param="messages")
    return rendered
