"""Packing token ids: the same numbers, and none outside the vocabulary."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.token_ids import pack_token_ids


@given(st.lists(st.integers(0, 2**31 - 1)))
def test_packs_the_same_numbers(token_ids):
    for form in (token_ids, tuple(token_ids), array("i", token_ids)):
        assert pack_token_ids(form) == array("i", token_ids)


@pytest.mark.parametrize("token_id", [-(2**31), -1, 100, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**64])
def test_refuses_a_token_outside_the_vocabulary(token_id):
    with pytest.raises(ValueError, match="outside 0 to 99"):
        pack_token_ids([0, token_id, 99], end=100)


@pytest.mark.parametrize("token_id", [-1, 2**31])
def test_refuses_what_is_no_int32_without_a_vocabulary(token_id):
    with pytest.raises(ValueError, match="outside 0 to 2147483647"):
        pack_token_ids((token_id,))


def test_the_last_token_of_the_vocabulary_and_no_token_are_packed():
    assert pack_token_ids([99, 0], end=100) == array("i", [99, 0])
    assert pack_token_ids((), end=100) == array("i")


def test_a_copy_is_returned():
    tokens = array("i", [1])
    assert pack_token_ids(tokens) is not tokens
