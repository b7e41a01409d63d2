"""Which hosts may be asked for images, and which addresses their names may have."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from core.errors import ConfigError
from router.images.hosts import HostRules, is_public

SETTING = "router.images.allowed_hosts"


@pytest.mark.parametrize(
    ("entry", "scheme", "host", "port", "is_allowed"),
    [
        ("images.example.com", "https", "images.example.com", 443, True),
        ("images.example.com", "http", "images.example.com", 80, True),
        ("images.example.com", "https", "IMAGES.example.com.", 443, True),
        ("Images.Example.com", "https", "images.example.com", 443, True),
        ("images.example.com", "https", "images.example.com", 8443, False),
        ("images.example.com", "http", "images.example.com", 443, False),
        ("images.example.com:8443", "https", "images.example.com", 8443, True),
        ("images.example.com:8443", "https", "images.example.com", 443, False),
        ("images.example.com", "https", "example.com", 443, False),
        ("images.example.com", "https", "images.example.com.evil.org", 443, False),
        ("*.example.com", "https", "a.b.example.com", 443, True),
        ("*.example.com", "https", "example.com", 443, False),
        ("*.example.com", "https", "evilexample.com", 443, False),
        ("10.1.0.0/16", "http", "10.1.2.3", 8080, True),
        ("10.1.0.0/16", "http", "10.2.2.3", 80, False),
        ("10.1.2.3", "http", "10.1.2.3", 80, True),
        ("[fd00::]/8", "http", "[fd00::1]", 80, True),
        ("images.example.com", "https", "8.8.8.8", 443, False),
    ],
)
def test_a_url_may_name_what_is_listed(entry, scheme, host, port, is_allowed):
    assert HostRules([entry.replace("[fd00::]/8", "fd00::/8")], SETTING).allows_host(scheme, host, port) is is_allowed


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.0.0.1",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
        "::1",
        "::",
        "fe80::1",
        "fd00::1",
        "ff02::1",
        "::ffff:10.0.0.1",
        "64:ff9b::10.0.0.1",
        "2002:7f00:1::",
        "::7f00:1",
        "::ffff:0:127.0.0.1",
        "64:ff9b:1::7f00:1",
        "fec0::1",
        "4000::1",
    ],
)
def test_no_name_may_resolve_into_the_operators_network(address):
    assert not is_public(ip_address(address))
    assert not HostRules(["images.example.com"], SETTING).allows_address(ip_address(address))


@pytest.mark.parametrize("address", ["8.8.8.8", "2001:4860:4860::8888", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8", "2002:808:808::"])
def test_public_addresses_are_reached(address):
    assert HostRules(["images.example.com"], SETTING).allows_address(ip_address(address))


def test_a_listed_network_is_reached_by_names_too():
    rules = HostRules(["images.internal", "10.1.0.0/16"], SETTING)
    assert rules.allows_address(ip_address("10.1.2.3"))
    assert not rules.allows_address(ip_address("10.2.2.3"))


@pytest.mark.parametrize(
    "entry", ["", "http://example.com", "example.com/path", "*", "a b", "example.com:0", "example.com:70000"]
)
def test_what_is_no_host_is_refused_by_its_setting(entry):
    with pytest.raises(ConfigError, match="is no host") as refused:
        HostRules([entry], SETTING)
    assert refused.value.param == SETTING


@pytest.mark.parametrize("entry", ["10.0.0.5:8080", "[fd00::1]:8080", "10.0.0.0/8:80"])
def test_an_address_with_a_port_is_refused_because_addresses_hold_for_all_ports(entry):
    with pytest.raises(ConfigError, match="leave the port out"):
        HostRules([entry], SETTING)


def test_a_name_of_another_script_is_refused_with_its_form():
    with pytest.raises(ConfigError, match=r"'bücher\.example'.*such as xn--bcher-kva\.example"):
        HostRules(["bücher.example"], SETTING)


def test_an_empty_list_is_false():
    assert not HostRules([], SETTING)
    assert HostRules(["example.com"], SETTING)
