"""The price of loading tokens from a tier."""

import pytest

from core.wire.contents import HOST, STORE
from router.routing.loads import LoadPrice


def test_before_the_first_load_a_share_of_the_computation_is_expected():
    assert LoadPrice().ms(1000, HOST, 500.0) == pytest.approx(100.0)
    assert LoadPrice().ms(1000, STORE, 500.0) == pytest.approx(250.0)


def test_the_price_is_learned_and_one_slow_load_changes_little():
    price = LoadPrice()
    for _ in range(20):
        price.observe(1000, 10.0)
    assert price.ms(2000, HOST, 500.0) == pytest.approx(20.0)
    price.observe(1000, 60_000.0)
    assert price.ms(1000, HOST, 500.0) == pytest.approx(16.0)
    for _ in range(40):
        price.observe(1000, 30.0)
    assert price.ms(1000, HOST, 500.0) == pytest.approx(30.0, rel=0.05)


@pytest.mark.parametrize(("num_tokens", "load_ms"), [(0, 5.0), (100, 0.0)])
def test_a_load_of_nothing_teaches_nothing(num_tokens, load_ms):
    price = LoadPrice()
    price.observe(num_tokens, load_ms)
    assert price.token_ms == 0.0
