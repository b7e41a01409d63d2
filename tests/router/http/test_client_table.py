from __future__ import annotations

import pytest

from core.errors import ConfigError
from router.http.client_table import ClientTable


def test_addresses_are_counted_apart():
    table = ClientTable(10, max_per_address=1)
    assert table.add("a", "10.0.0.1")
    assert table.add("b", "10.0.0.2")
    assert not table.add("c", "10.0.0.1")


def test_removed_connections_make_room():
    table = ClientTable(10, max_per_address=1)
    table.add("a", "10.0.0.1")
    table.remove("a")
    table.remove("a")
    assert table.add("b", "10.0.0.1")
    assert len(table) == 1


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("2001:db8::1", "2001:db8::2", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("fe80::1%eth0", "fe80::2%eth0", True),
    ],
)
def test_ipv6_address_counts_as_its_network(one, other, is_same):
    table = ClientTable(10, max_per_address=1)
    table.add("a", one)
    assert table.add("b", other) is not is_same


def test_proxies_and_unix_sockets_have_no_bound():
    table = ClientTable(10, max_per_address=1, proxies=("10.0.0.0/8", "2001:db8::1"))
    for index, address in enumerate(("10.1.2.3", "10.1.2.3", "2001:db8::1", "2001:db8::1", "", "")):
        assert table.add(index, address)


def test_nonsense_as_proxy_is_refused_by_name():
    with pytest.raises(ConfigError, match="'load-balancer' is neither") as raised:
        ClientTable(10, proxies=("load-balancer",))
    assert raised.value.param == "router.proxy_addresses"


def test_longest_idle_is_the_one_that_was_served_first():
    table = ClientTable(2)
    for name in "abc":
        table.add(name, "10.0.0.1")
    assert table.is_overfull
    table.mark_busy("a")
    table.mark_busy("b")
    assert table.longest_idle() == "c"
    table.mark_idle("b")
    table.mark_idle("a")
    table.remove("c")
    assert table.longest_idle() == "b"
    assert not table.is_overfull


def test_connection_that_is_gone_does_not_become_idle():
    table = ClientTable(2)
    table.add("a", "10.0.0.1")
    table.mark_busy("a")
    table.remove("a")
    table.mark_idle("a")
    assert table.num_idle == 0
