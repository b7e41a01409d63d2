"""Sockets with the cluster's key talk to each other only, and traffic cannot be read on the way."""

import contextlib
import socket
import threading

import pytest
import zmq
import zmq.asyncio

from core.errors import ConfigError
from core.ids import SeededIds
from core.wire.curve import FRAME_OVERHEAD_BYTES, derive_keys, new_cluster_key
from core.wire.sockets import SocketOptions, bind, dealer_socket, router_socket

KEY = derive_keys("a secret of the cluster, long enough to be one")
OTHER_KEY = derive_keys("the secret of another cluster, as long as that")
WAIT_MS = 5000
MAX_BYTES = 1 << 16
REFUSED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


@pytest.fixture
def context():
    with zmq.Context() as context:
        yield context
        context.destroy(linger=0)


@pytest.fixture
def server(context):
    return router_socket(context, SocketOptions(max_message_bytes=MAX_BYTES, keys=KEY))


@pytest.fixture
def address(server):
    return bind(server, "tcp://127.0.0.1:0")


def client_of(context, address, keys):
    found = dealer_socket(context, SocketOptions(max_message_bytes=MAX_BYTES, keys=keys))
    found.setsockopt(zmq.IMMEDIATE, 0)
    found.connect(address)
    return found


def test_members_talk(context, server, address):
    client = client_of(context, address, KEY)
    client.send(b"question")
    assert server.poll(WAIT_MS)
    identity, question = server.recv_multipart()
    server.send_multipart([identity, question + b" answered"])
    assert client.poll(WAIT_MS)
    assert client.recv() == b"question answered"


def test_largest_frame_passes_and_a_larger_one_ends_the_connection(context, server, address):
    client = client_of(context, address, KEY)
    client.send(bytes(MAX_BYTES))
    assert server.poll(WAIT_MS)
    assert len(server.recv_multipart()[1]) == MAX_BYTES
    monitor = server.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    client.send(bytes(MAX_BYTES + FRAME_OVERHEAD_BYTES))
    assert monitor.poll(WAIT_MS), "the connection was kept"
    assert not server.poll(0)
    server.disable_monitor()


@pytest.mark.parametrize("keys", [None, OTHER_KEY], ids=["no key", "another key"])
def test_others_are_refused(context, server, address, keys):
    monitor = server.get_monitor_socket(REFUSED)
    client = client_of(context, address, keys)
    client.send(b"question")
    assert monitor.poll(WAIT_MS), "the handshake did not fail"
    assert not server.poll(0)
    server.disable_monitor()


def test_member_does_not_talk_to_an_open_server(context):
    server = router_socket(context, SocketOptions(max_message_bytes=MAX_BYTES))
    address = bind(server, "tcp://127.0.0.1:0")
    client = dealer_socket(context, SocketOptions(max_message_bytes=MAX_BYTES, keys=KEY))
    monitor = client.get_monitor_socket(REFUSED)
    client.connect(address)
    assert monitor.poll(WAIT_MS), "the handshake did not fail"
    client.disable_monitor()


def test_neither_content_nor_key_is_on_the_wire(context, server, address):
    seen = bytearray()
    with _tap(address, seen) as tapped:
        client = client_of(context, tapped, KEY)
        client.send(b"a prompt that is nobody's business")
        assert server.poll(WAIT_MS)
        assert server.recv_multipart()[1] == b"a prompt that is nobody's business"
        client.close()
    assert b"CURVE" in seen
    assert b"prompt" not in seen
    assert zmq.utils.z85.decode(KEY.server_public) not in seen


@contextlib.contextmanager
def _tap(address, seen):
    """Pass one connection on to ``address`` and keep what the client sends."""
    host, port = address.removeprefix("tcp://").split(":")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pump(source, target, keep):
            with contextlib.suppress(OSError):
                while content := source.recv(65536):
                    if keep:
                        seen.extend(content)
                    target.sendall(content)

        def serve():
            inside, _ = listener.accept()
            outside = socket.create_connection((host, int(port)))
            back = threading.Thread(target=pump, args=(outside, inside, False))
            back.start()
            pump(inside, outside, True)
            for end in (inside, outside):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            back.join()
            inside.close()
            outside.close()

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(timeout=10)
        assert not thread.is_alive()


def test_keys_are_derived_alike_everywhere_and_differ_by_role():
    assert derive_keys("a secret of the cluster, long enough to be one") == KEY
    assert len({KEY.server_public, KEY.server_secret, KEY.client_public, KEY.client_secret}) == 4


def test_no_key_stands_for_open_sockets_and_a_short_one_is_refused():
    assert derive_keys("") is None
    with pytest.raises(ConfigError, match="at least 32"):
        derive_keys("x" * 31)


def test_new_keys_are_long_and_keys_are_not_shown():
    assert len(new_cluster_key(SeededIds(1))) == 64
    assert new_cluster_key(SeededIds(1)) != new_cluster_key(SeededIds(2))
    assert KEY.server_secret.decode() not in repr(KEY)
