"""Whether a whole text follows an output's grammar, by the real grammar library."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import Tokenizer

from core.grammar.compiled import CompiledGrammar, Vocabulary
from core.wire.sampling import StructuredOutput
from tests.support.json_model import EOS_TOKEN_IDS


def text_checker(tokenizer: Tokenizer, vocabulary: Vocabulary | None = None) -> Callable[[StructuredOutput, str], bool]:
    """Return the check; each output is compiled once. The tokenizer is that of ``tests.support.json_model``."""
    vocabulary = vocabulary or Vocabulary(tokenizer.to_str(), tokenizer.get_vocab_size(), EOS_TOKEN_IDS)
    compiled: dict[StructuredOutput, CompiledGrammar] = {}

    def follows(output: StructuredOutput, text: str) -> bool:
        if output not in compiled:
            compiled[output] = CompiledGrammar(output, vocabulary)
        matcher = compiled[output].start()
        matcher.accept(tokenizer.encode(text).ids)
        allowed = matcher.allowed()
        return allowed is not None and bool(allowed[list(EOS_TOKEN_IDS)].all())

    return follows
