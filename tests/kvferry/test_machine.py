"""The facts about this machine."""

from __future__ import annotations

import socket

import pytest

from kvferry import machine
from kvferry.machine import (
    format_bytes,
    memory_limit_bytes,
    share_an_address,
    why_no_cuda,
    why_not_creatable,
    why_not_writable,
)


def test_container_s_limit_counts_if_it_is_lower_than_the_machine_s(tmp_path):
    limit = tmp_path / "memory.max"
    limit.write_text("1048576\n")
    assert memory_limit_bytes((str(limit),)) == 1 << 20
    limit.write_text("max\n")
    assert memory_limit_bytes((str(limit),)) > 1 << 20


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(12, "12 bytes"), (1 << 30, "1 GiB"), (3 << 29, "1.5 GiB"), (192 << 20, "192 MiB"), (1 << 41, "2 TiB")],
)
def test_bytes_are_shown_in_the_largest_unit_that_fits(num_bytes, text):
    assert format_bytes(num_bytes) == text


def test_reason_for_no_gpu_is_the_first_thing_that_is_missing(monkeypatch):
    monkeypatch.setattr(machine, "version", lambda _: "2.9.0+cpu")
    assert why_no_cuda() == "torch 2.9.0+cpu is built for the CPU only"
    monkeypatch.setattr(machine, "version", lambda _: "2.9.0")
    monkeypatch.setattr(machine, "_CUDA_DRIVER", "libno-such-driver.so")
    assert why_no_cuda() == "there is no NVIDIA driver (libno-such-driver.so)"


@pytest.mark.parametrize(
    ("first", "second", "is_shared"),
    [
        ("localhost", "127.0.0.1", True),
        ("[::1]", "0:0:0:0:0:0:0:1", True),
        ("", "127.0.0.1", True),
        ("*", "lo", True),
        ("127.0.0.1", "0:0:0:0:0:0:0:0", True),
        ("no-such-host.invalid", "no-such-host.invalid", True),
        ("127.0.0.1", "127.0.0.2", False),
        ("no-such-host.invalid", "127.0.0.1", False),
        ("a..b", "127.0.0.1", False),
        ("a\0b", "127.0.0.1", False),
        ("x" * 70, "x" * 70, True),
    ],
)
def test_hosts_are_compared_by_the_addresses_that_they_stand_for(first, second, is_shared):
    assert share_an_address(first, second) == share_an_address(second, first) == is_shared


@pytest.mark.parametrize(("second", "is_shared"), [("127.0.0.1", True), ("::1", True), ("127.0.0.2", False), ("::2", False)])
def test_a_name_stands_for_its_addresses_of_both_families(second, is_shared, monkeypatch):
    def getaddrinfo(host, _port, family=socket.AF_UNSPEC):
        hosts = ["127.0.0.1", "::1"] if host == "both.example" else [host]
        families = [socket.AF_INET6 if ":" in one else socket.AF_INET for one in hosts]
        found = [(each, socket.SOCK_STREAM, 0, "", (one, 0)) for each, one in zip(families, hosts, strict=True)]
        return [one for one in found if family in (socket.AF_UNSPEC, one[0])]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    assert share_an_address("both.example", second) is is_shared


def test_folder_below_a_file_is_not_writable(tmp_path):
    (tmp_path / "file").touch()
    assert why_not_writable(tmp_path / "file" / "x") == "Not a directory"
    assert why_not_writable(tmp_path / "a" / "b") is None


def test_folder_that_could_be_made_is_not_made(tmp_path):
    (tmp_path / "file").touch()
    assert why_not_creatable(tmp_path / "a" / "b") is None
    assert why_not_creatable(tmp_path / "file" / "x") == "File exists"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
