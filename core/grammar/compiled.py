"""Compiled grammars, and one request's place in one: which tokens may come next.

Owns what is asked of the grammar library (llguidance). A grammar is shared by all requests that have it, and so are the lexer
states that their outputs add to it; a ``GrammarMatcher`` belongs to one request and is a pure function of the grammar and the
tokens so far, so any worker rebuilds it from them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from core.errors import InvalidRequest, KVFerryError
from core.grammar.limits import ENDLESS
from core.grammar.translation import to_grammar
from core.wire.sampling import StructuredOutput

MAX_LEXER_STATES = 50_000  # of one grammar, about 1 kB each; checked at a mask, so a replay may pass it before its first
_BASE_BYTES = 96 << 10  # of a small grammar, measured
_BYTES_PER_BYTE = 32  # of the translated grammar, measured: 23
_BYTES_PER_MASK = 1 << 10  # lexer states that a mask adds, measured: 0.25 kB
_MAX_REASON_CHARACTERS = 500
_TOO_COMPLEX = "the grammar is too complex to go on"
_NO_TOKEN = "NoExtensionBias"  # the library's word for a place where no token is allowed
_TOO_MANY_REFERENCES = "Schema intersection stack level exceeded"  # the library's words
_NOTHING_FOLLOWS = "nothing can follow: a part of it allows no text, for example one that refers only to itself"


class Vocabulary:
    """The tokens of a model, as the grammar library knows them.

    ``tokenizer_json`` is the text of ``tokenizer.json``, ``vocab_size`` the number of the model's logits. ``eos_token_ids`` all
    end a complete output.

    Raises: InvalidRequest if the model has no end of text, or a tokenizer that the library cannot read.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        if not eos_token_ids:
            raise InvalidRequest("structured output is not available: the model has no end-of-text token")
        try:
            self.tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_token_ids))
        except ValueError as error:
            raise InvalidRequest(f"structured output is not available with this model's tokenizer: {_reason(error)}") from None
        added = json.loads(tokenizer_json).get("added_tokens") or ()
        self.special_tokens = frozenset(token["content"] for token in added if token.get("special"))
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)


class CompiledGrammar:
    """One grammar, compiled for one vocabulary. One thread at a time.

    Raises: InvalidRequest if it is malformed, too large, or uses what is not supported; the message names it.
    """

    def __init__(self, output: StructuredOutput, vocabulary: Vocabulary) -> None:
        text = to_grammar(output, vocabulary.special_tokens)
        limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        self._start = LLMatcher(vocabulary.tokenizer, text, log_level=0, limits=limits)
        if self._start.is_error():
            raise InvalidRequest(f"{output.kind} is not supported as it is: {_reason(self._start.get_error())}")
        self._vocab_size = vocabulary.vocab_size
        self._eos_token_ids = vocabulary.eos_token_ids
        self._text_bytes = len(text)
        self.num_masks = 0
        self.is_broken = False  # the states that all its requests share are full: none of them can go on

    @property
    def num_bytes(self) -> int:
        """The memory it takes, estimated."""
        states = min(self.num_masks * _BYTES_PER_MASK, MAX_LEXER_STATES << 10)
        return _BASE_BYTES + _BYTES_PER_BYTE * self._text_bytes + states

    def ends_with(self, token_id: int) -> bool:
        """True for an end-of-text token: nothing follows it."""
        return token_id in self._eos_token_ids

    def start(self, output_token_ids: Sequence[int] = ()) -> GrammarMatcher:
        """Return the place of a request that has put out these tokens."""
        matcher = GrammarMatcher(self, self._start.deep_copy(), self._vocab_size)
        matcher.accept(output_token_ids)
        return matcher

    def find_whether_broken(self) -> bool:
        """Return ``is_broken``, by whether a request could begin."""
        if not self.is_broken:
            newcomer = self._start.deep_copy()
            newcomer.compute_bitmask()
            self.is_broken = newcomer.is_error()
        return self.is_broken


class GrammarMatcher:
    """One request's place in a grammar. ``error`` says why nothing can follow; it is None at a regular end.

    If the grammar ``is_broken``, the error may be due to other requests; the same tokens may go on in one that is not.
    """

    __slots__ = ("_grammar", "_has_ended", "_matcher", "_vocab_size", "error")

    def __init__(self, grammar: CompiledGrammar, matcher: LLMatcher, vocab_size: int) -> None:
        self._grammar = grammar
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._has_ended = False
        self.error: KVFerryError | None = None

    def accept(self, token_ids: Sequence[int]) -> None:
        """Go on by these tokens. One that the grammar does not allow is an error that stays."""
        if self.error is not None or self._has_ended or not token_ids:
            return
        self._has_ended = self._grammar.ends_with(token_ids[-1])
        text = token_ids[:-1] if self._has_ended else token_ids
        follows = not text or self._matcher.consume_tokens(list(text))
        if follows and self._has_ended:  # the library may refuse an end after the last possible token
            follows = self._matcher.is_accepting() or self._matcher.consume_tokens([token_ids[-1]])
        if not follows:
            self._fail("a token of the output does not follow the grammar")

    def allowed(self) -> npt.NDArray[np.bool_] | None:
        """Return which tokens may come next, ``[vocab_size]``; end-of-text tokens are among them once the output is complete.

        None if none may: the output has ended, or see ``error``.
        """
        bits = self.allowed_bits()
        return None if bits is None else unpacked(bits, self._vocab_size)

    def allowed_bits(self) -> npt.NDArray[np.uint8] | None:
        """Return ``allowed`` as bits, eight tokens a byte from the lowest bit on."""
        if self.error is not None or self._has_ended:
            return None
        self._grammar.num_masks += 1
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            self._fail(_TOO_COMPLEX)
            return None
        return bits

    def _fail(self, what: str) -> None:
        if self._grammar.find_whether_broken():
            what = _TOO_COMPLEX
        reason = _reason(self._matcher.get_error())
        self.error = KVFerryError(f"structured output: {_NOTHING_FOLLOWS if _NO_TOKEN in reason else f'{what}: {reason}'}")


def unpacked(bits: npt.NDArray[np.uint8], vocab_size: int) -> npt.NDArray[np.bool_]:
    """Return allowed tokens, ``[vocab_size]``, from their bits."""
    return np.unpackbits(bits, bitorder="little", count=vocab_size).view(np.bool_)


def _reason(error: object) -> str:
    """Return the library's reason as one line, without its advice to approximate ``oneOf``, which would not enforce it."""
    text = str(error).partition(" Enable 'coerce_one_of'")[0].replace("<non-verbose/>", "")
    text = text.replace(_TOO_MANY_REFERENCES, f"the schema {ENDLESS}")
    return " ".join(text.split())[:_MAX_REASON_CHARACTERS]
