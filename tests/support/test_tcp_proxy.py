"""The proxy of the fault tests: what passes, what does not, and what comes late."""

from __future__ import annotations

import socket

import pytest

from tests.support.tcp_proxy import TcpProxy

PATIENCE_S = 10.0


@pytest.fixture
def server():
    with socket.create_server(("127.0.0.1", 0)) as found:
        found.settimeout(PATIENCE_S)
        yield found


@pytest.fixture
def proxy(server):
    with TcpProxy(server.getsockname(), ("127.0.0.2", 0)) as found:
        yield found


@pytest.fixture
def ends(server, proxy):
    """Both ends of a connection through the proxy."""
    with connect(proxy) as client, server.accept()[0] as accepted:
        accepted.settimeout(PATIENCE_S)
        yield client, accepted


def connect(proxy):
    return socket.create_connection(proxy.address, timeout=PATIENCE_S)


def receive(end, number):
    found = b""
    while len(found) < number:
        piece = end.recv(number - len(found))
        assert piece, "the connection ended"
        found += piece
    return found


def assert_nothing_comes(end):
    end.setblocking(False)
    with pytest.raises(BlockingIOError):
        end.recv(1)
    end.settimeout(PATIENCE_S)


def test_bytes_and_the_end_pass_in_both_directions(proxy, ends):
    client, accepted = ends
    assert proxy.address[0] == "127.0.0.2"
    content = bytes(range(256)) * 2048
    client.sendall(b"question")
    assert receive(accepted, 8) == b"question"
    accepted.sendall(content)
    client.shutdown(socket.SHUT_WR)
    assert accepted.recv(1) == b""
    assert receive(client, len(content)) == content
    accepted.shutdown(socket.SHUT_WR)
    assert client.recv(1) == b""


def test_what_is_sent_in_the_silence_comes_when_it_is_over(proxy, ends):
    client, accepted = ends
    proxy.silence()
    assert proxy.is_silent
    client.sendall(b"question")
    accepted.sendall(b"answer")
    accepted.close()
    assert_nothing_comes(client)
    proxy.heal()
    assert receive(client, 6) == b"answer"
    assert client.recv(1) == b""


def test_silence_begins_in_the_midst_of_an_answer(proxy, ends):
    client, accepted = ends
    proxy.silence(100_000)
    assert not proxy.is_silent
    content = b"0123456789" * 20_000
    accepted.sendall(content)
    client.sendall(b"questions are not counted")
    assert receive(client, 100_000) == content[:100_000]
    proxy.silence()  # returns when the thread has done what it was at
    assert_nothing_comes(client)
    proxy.heal()
    assert receive(client, 100_000) == content[100_000:]


def test_requests_pass_while_answers_are_silent(proxy, ends):
    client, accepted = ends
    proxy.silence_answers(3)
    accepted.sendall(b"answer")
    assert receive(client, 3) == b"ans"
    client.sendall(b"question")
    assert receive(accepted, 8) == b"question"
    assert_nothing_comes(client)
    proxy.heal()
    assert receive(client, 3) == b"wer"


def test_no_answer_comes_on_a_connection_made_in_the_silence(server, proxy):
    proxy.silence()
    with connect(proxy) as client:
        client.sendall(b"hello")
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()
        server.settimeout(PATIENCE_S)
        proxy.heal()
        with server.accept()[0] as accepted:
            assert receive(accepted, 5) == b"hello"


def test_reset_breaks_both_ends_and_the_next_connection_is_carried(server, proxy, ends):
    client, accepted = ends
    proxy.reset()
    for end in (client, accepted):
        with pytest.raises(ConnectionResetError):
            end.recv(1)
    with connect(proxy) as again, server.accept()[0] as accepted_again:
        again.sendall(b"hello")
        assert receive(accepted_again, 5) == b"hello"


def test_connection_without_a_listener_is_reset(server, proxy):
    server.close()
    with pytest.raises(ConnectionResetError), connect(proxy) as client:  # connecting itself may already meet it
        client.recv(1)


def test_loss_of_one_end_is_told_to_the_other(ends):
    client, accepted = ends
    accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    accepted.close()
    with pytest.raises(ConnectionResetError):
        client.recv(1)
