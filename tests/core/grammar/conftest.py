from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from core.grammar.child import Setup
from core.grammar.compiled import Vocabulary
from tests.support.json_model import EOS_TOKEN_IDS, write_json_tokenizer

VOCAB_SIZE = 640  # more than the tokenizer has, as in padded models


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_json_tokenizer(folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="session")
def setup(tokenizer) -> Setup:
    return Setup(tokenizer.to_str(), VOCAB_SIZE, EOS_TOKEN_IDS)


@pytest.fixture(scope="session")
def vocabulary(setup) -> Vocabulary:
    return Vocabulary(setup.tokenizer_json, setup.vocab_size, setup.eos_token_ids)
