"""Images of other hosts: a real HTTP server on loopback, and names that resolve as a test says."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from ipaddress import ip_address

import httpx
import pytest

from core.errors import InvalidRequest, Overloaded
from router.images.fetch import FetchLimits, ImageFetcher, Resolver
from router.images.hosts import HostRules

LIMITS = FetchLimits(max_bytes=1000, max_redirects=2, timeout_s=5.0, max_fetches=8)
LOOPBACK = "127.0.0.0/8"


def ok(body: bytes, *headers: str) -> bytes:
    lines = ["HTTP/1.1 200 OK", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def redirect(target: str) -> bytes:
    return f"HTTP/1.1 302 Found\r\nlocation: {target}\r\ncontent-length: 0\r\n\r\n".encode()


@pytest.fixture
async def make_fetcher():
    made: list[ImageFetcher] = []

    def make(*entries: str, names: dict[str, str] | None = None, **limits) -> ImageFetcher:
        async def resolve(name: str, port: int):
            return [ip_address(address) for address in (names or {})[name].split()]

        changed = FetchLimits(**{**{field: getattr(LIMITS, field) for field in FetchLimits.__dataclass_fields__}, **limits})
        made.append(ImageFetcher(HostRules(entries, "x"), changed, resolve))
        return made[-1]

    yield make
    for fetcher in made:
        await fetcher.close()


Make = Callable[..., ImageFetcher]


async def refusal(fetcher: ImageFetcher, url: str) -> str:
    with pytest.raises(InvalidRequest) as refused:
        await asyncio.wait_for(fetcher.fetch(url), 20)
    return refused.value.message


async def test_what_a_listed_host_has_is_fetched(host, make_fetcher: Make):
    host.pages["/cat"] = ok(b"a cat")
    assert await make_fetcher(LOOPBACK).fetch(f"{host.url}/cat") == b"a cat"
    assert f"host: 127.0.0.1:{host.port}" in host.requests[0].lower()


async def test_a_name_is_resolved_once_and_told_to_the_host(host, make_fetcher: Make):
    host.pages["/cat"] = ok(b"a cat")
    fetcher = make_fetcher(f"cats.example:{host.port}", LOOPBACK, names={"cats.example": "127.0.0.1"})
    assert await fetcher.fetch(f"http://cats.example:{host.port}/cat") == b"a cat"
    assert f"host: cats.example:{host.port}" in host.requests[0].lower()


@pytest.mark.parametrize("addresses", ["127.0.0.2 127.0.0.1", "10.0.0.1 127.0.0.3 127.0.0.2 127.0.0.1", "127.0.0.1 127.0.0.2"])
async def test_the_first_allowed_address_that_answers_is_asked(host, make_fetcher: Make, addresses):
    host.pages["/cat"] = ok(b"a cat")
    fetcher = make_fetcher(f"cats.example:{host.port}", LOOPBACK, names={"cats.example": addresses})
    assert await fetcher.fetch(f"http://cats.example:{host.port}/cat") == b"a cat"
    assert len(host.requests) == 1


@pytest.mark.parametrize(("count", "connect_s"), [(1, 8.0), (2, 4.0), (16, 1.0)])
async def test_addresses_share_the_time_to_connect(host, make_fetcher: Make, monkeypatch, count, connect_s):
    addresses = [f"127.0.0.{number}" for number in range(1, count + 1)]
    names = {"cats.example": " ".join(addresses)}
    fetcher = make_fetcher(f"cats.example:{host.port}", LOOPBACK, names=names, timeout_s=8.0)
    tried = []

    async def silent(request, **options):
        tried.append((request.url.host, request.extensions["timeout"]["connect"]))
        raise httpx.ConnectTimeout("no answer")

    monkeypatch.setattr(fetcher._open_client(), "send", silent)
    assert "ConnectTimeout" in await refusal(fetcher, f"http://cats.example:{host.port}/cat")
    assert tried == [(address, connect_s) for address in addresses]


async def test_a_listed_name_with_a_private_address_is_not_asked(host, make_fetcher: Make):
    fetcher = make_fetcher(f"cats.example:{host.port}", names={"cats.example": "127.0.0.1"})
    assert "no address" in await refusal(fetcher, f"http://cats.example:{host.port}/cat")
    assert not host.requests


async def test_a_host_that_is_not_listed_is_not_asked(host, make_fetcher: Make):
    assert "not fetched from 127.0.0.1" in await refusal(make_fetcher("cats.example"), f"{host.url}/cat")
    assert not host.requests


async def test_redirects_are_followed_on_the_list(host, make_fetcher: Make):
    host.pages |= {"/a": redirect("/b"), "/b": redirect(f"{host.url}/c"), "/c": ok(b"a cat")}
    assert await make_fetcher(LOOPBACK).fetch(f"{host.url}/a") == b"a cat"


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("http://10.0.0.1/cat", "not fetched from 10.0.0.1"),
        ("http://dogs.example/", "not fetched from dogs.example"),
        ("file:///etc/passwd", "neither a data: nor an http"),
        ("http://me:secret@127.0.0.1/", "user or a password"),
        ("http://xn--a.test/", "could not be fetched"),
    ],
)
async def test_redirects_do_not_leave_the_list(host, make_fetcher: Make, target, why):
    host.pages["/a"] = redirect(target)
    assert why in await refusal(make_fetcher(LOOPBACK), f"{host.url}/a")


async def test_redirects_end(host, make_fetcher: Make):
    host.pages["/a"] = redirect("/a")
    assert "more than 2 times" in await refusal(make_fetcher(LOOPBACK), f"{host.url}/a")
    assert len(host.requests) == 3


@pytest.mark.parametrize(
    "page",
    [
        ok(b"x" * 1001),
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
        + b"1f4\r\n"
        + b"x" * 500
        + b"\r\n"
        + b"1f5\r\n"
        + b"x" * 501
        + b"\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + b"x" * 5000,
    ],
    ids=["told", "chunked", "untold"],
)
async def test_more_than_may_be_is_not_read(host, make_fetcher: Make, page):
    host.pages["/big"] = page
    assert "more than 1000 bytes" in await refusal(make_fetcher(LOOPBACK), f"{host.url}/big")


async def test_a_body_of_just_the_limit_is_taken(host, make_fetcher: Make):
    host.pages["/big"] = ok(b"x" * 1000)
    assert len(await make_fetcher(LOOPBACK).fetch(f"{host.url}/big")) == 1000


async def test_a_compressed_body_is_refused(host, make_fetcher: Make):
    host.pages["/zip"] = ok(b"x", "content-encoding: gzip")
    assert "compressed" in await refusal(make_fetcher(LOOPBACK), f"{host.url}/zip")


async def test_a_host_that_says_no_is_quoted_by_its_status(host, make_fetcher: Make):
    assert "status 404" in await refusal(make_fetcher(LOOPBACK), f"{host.url}/nothing")


@pytest.mark.slow
async def test_a_host_that_says_nothing_is_not_waited_for(host, make_fetcher: Make):
    host.pages["/slow"] = None
    assert "longer than 0.3 s" in await refusal(make_fetcher(LOOPBACK, timeout_s=0.3), f"{host.url}/slow")


async def test_a_host_that_is_not_there_is_said_to_be_so(make_fetcher: Make):
    assert "could not be fetched" in await refusal(make_fetcher(LOOPBACK), "http://127.0.0.1:1/cat")


async def test_images_are_fetched_side_by_side_but_not_too_many(host, make_fetcher: Make):
    host.pages["/cat"] = ok(b"a cat")
    host.gate.clear()
    fetcher = make_fetcher(LOOPBACK, max_fetches=4)  # of which one is left to other hosts
    fetches = [asyncio.create_task(fetcher.fetch(f"{host.url}/cat")) for _ in range(7)]
    async with asyncio.timeout(10):
        while host.num_open < 3:
            await host.asked.wait()
            host.asked.clear()
    host.gate.set()
    assert await asyncio.gather(*fetches) == [b"a cat"] * 7
    assert host.most_open == 3


async def test_a_host_that_says_nothing_does_not_keep_other_hosts_waiting(host, make_fetcher: Make):
    host.pages |= {"/slow": None, "/cat": ok(b"a cat")}
    names = dict.fromkeys(("slow.example", "fast.example"), "127.0.0.1")
    fetcher = make_fetcher(*(f"{name}:{host.port}" for name in names), LOOPBACK, names=names, max_fetches=4, timeout_s=60)
    slow = [asyncio.create_task(fetcher.fetch(f"http://slow.example:{host.port}/slow")) for _ in range(20)]
    try:
        async with asyncio.timeout(10):
            while host.num_open < 3:
                await host.asked.wait()
                host.asked.clear()
            assert await fetcher.fetch(f"http://fast.example:{host.port}/cat") == b"a cat"
    finally:
        for fetch in slow:
            fetch.cancel()
        await asyncio.gather(*slow, return_exceptions=True)


async def test_a_name_asked_for_many_times_at_once_is_resolved_once(monkeypatch):
    gate, asked = threading.Event(), []

    def slow(*address, **options):
        asked.append(address)
        gate.wait(20)
        raise socket.gaierror("no such name")

    monkeypatch.setattr("router.images.fetch.socket.getaddrinfo", slow)
    resolver = Resolver()
    waits = [asyncio.create_task(resolver.resolve("slow.example", 80)) for _ in range(50)]
    await asyncio.sleep(0)
    waits[0].cancel()
    gate.set()
    found = await asyncio.gather(*waits, return_exceptions=True)
    assert [type(error) for error in found] == [asyncio.CancelledError] + [socket.gaierror] * 49
    assert asked == [("slow.example", 80)]
    await asyncio.gather(resolver.resolve("slow.example", 80), return_exceptions=True)
    assert len(asked) == 2
    resolver.close()


async def test_names_that_nobody_waits_for_any_more_are_not_looked_up(monkeypatch):
    gate, begun, asked = threading.Event(), threading.Semaphore(0), []

    def slow(host, port, **options):
        asked.append(host)
        begun.release()
        gate.wait(20)
        return []

    monkeypatch.setattr("router.images.fetch.socket.getaddrinfo", slow)
    resolver = Resolver()
    waits = [asyncio.create_task(resolver.resolve(f"n{number}.example", 80)) for number in range(36)]
    again = asyncio.create_task(resolver.resolve("n20.example", 80))
    for _ in range(16):  # as many as there are threads
        assert await asyncio.to_thread(begun.acquire, timeout=20)
    for wait in waits:
        wait.cancel()
    assert {type(error) for error in await asyncio.gather(*waits, return_exceptions=True)} == {asyncio.CancelledError}
    fast = [asyncio.create_task(resolver.resolve(host, 80)) for host in ("fast.example", "n30.example")]
    await asyncio.sleep(0)
    gate.set()
    assert await asyncio.gather(again, *fast) == [[], [], []]
    assert sorted(asked[16:]) == ["fast.example", "n20.example", "n30.example"]
    resolver.close()


async def test_a_name_for_which_no_thread_can_be_started_is_not_looked_up_later(host, monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    asked = []

    def look_up(name, port, **options):
        asked.append(name)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    host.pages["/cat"] = ok(b"a cat")
    monkeypatch.setattr("router.images.fetch.socket.getaddrinfo", look_up)
    names = ("dogs.example", "cats.example")
    fetcher = ImageFetcher(HostRules((LOOPBACK, *(f"{name}:{host.port}" for name in names)), "x"), LIMITS)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(Overloaded, match="can't start new thread"):
                await fetcher.fetch(f"http://dogs.example:{host.port}/cat")
        assert await fetcher.fetch(f"http://cats.example:{host.port}/cat") == b"a cat"
    finally:
        await fetcher.close()
    assert asked == ["cats.example"]


@pytest.mark.parametrize("url", ["ftp://127.0.0.1/cat", "cat.png", "", "http://", "http://[::1", "/cat", "javascript:alert(1)"])
async def test_what_is_no_http_url_is_refused(make_fetcher: Make, url):
    assert "URL" in await refusal(make_fetcher(LOOPBACK), url)


@pytest.mark.parametrize("port", [-1, 0, 65536, 99999, 10**20])
async def test_a_url_with_an_impossible_port_is_refused(host, make_fetcher: Make, port):
    url = f"http://127.0.0.1:{port}/"
    host.pages["/a"] = redirect(url)
    for asked in (url, f"{host.url}/a"):
        assert "URL" in await refusal(make_fetcher(LOOPBACK), asked)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://xn--a.test/x", "not fetched from xn--a.test"),
        ("http://xn--/x", "not fetched from xn--"),
        ("http://a..example.com/x.png", "could not be fetched"),
        (f"http://{'a' * 64}.example.com/x.png", "could not be fetched"),
    ],
)
async def test_a_host_that_is_no_name_is_refused(url, why):
    fetcher = ImageFetcher(HostRules(["*.example.com"], "x"), LIMITS)
    assert why in await refusal(fetcher, url)
    await fetcher.close()


@pytest.mark.parametrize("name", ["bücher.example", "xn--bcher-kva.example"])
async def test_a_name_of_another_script_is_listed_and_asked_in_ascii(host, make_fetcher: Make, name):
    host.pages["/cat"] = ok(b"a cat")
    fetcher = make_fetcher(f"xn--bcher-kva.example:{host.port}", LOOPBACK, names={"xn--bcher-kva.example": "127.0.0.1"})
    assert await fetcher.fetch(f"http://{name}:{host.port}/cat") == b"a cat"
    assert f"host: xn--bcher-kva.example:{host.port}" in host.requests[0].lower()


async def test_cookies_of_hosts_are_not_kept(host, make_fetcher: Make):
    host.pages["/cat"] = ok(b"a cat", "set-cookie: visitor=1; path=/")
    fetcher = make_fetcher(LOOPBACK)
    for _ in range(2):
        await fetcher.fetch(f"{host.url}/cat")
    assert not any("cookie:" in request.lower() for request in host.requests)


async def test_names_are_those_of_the_system():
    resolver = Resolver()
    found = await resolver.resolve("localhost", 80)
    assert not {ip_address("127.0.0.1"), ip_address("::1")}.isdisjoint(found)
    resolver.close()
    resolver.close()


@pytest.mark.slow
async def test_names_that_take_their_time_keep_no_thread_from_others(make_fetcher: Make, monkeypatch):
    gate, asked = threading.Event(), threading.Semaphore(0)

    def slow(*address, **options):
        asked.release()
        gate.wait(20)
        return []

    monkeypatch.setattr("router.images.fetch.socket.getaddrinfo", slow)
    fetcher = ImageFetcher(HostRules(["*.example"], "x"), replace(LIMITS, max_fetches=50, timeout_s=0.5))
    fetches = [asyncio.create_task(refusal(fetcher, f"http://n{number}.example/")) for number in range(50)]
    try:
        assert await asyncio.to_thread(asked.acquire, timeout=10)
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), 10) == "free"
        assert all("longer than" in message for message in await asyncio.gather(*fetches))
    finally:
        gate.set()
        await fetcher.close()


async def test_a_name_that_does_not_exist_is_said_not_to_be_had(monkeypatch):
    def unknown(*address, **options):
        raise socket.gaierror("no such name")

    monkeypatch.setattr("router.images.fetch.socket.getaddrinfo", unknown)
    fetcher = ImageFetcher(HostRules(["cats.example"], "x"), LIMITS)
    assert "could not be fetched" in await refusal(fetcher, "http://cats.example/")
    await fetcher.close()
