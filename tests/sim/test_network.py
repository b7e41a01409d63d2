"""The simulated network fails as TCP under ZeroMQ does: late, broken, partitioned, never out of order."""

from random import Random

import pytest

from kvferry.sim.loop import EventLoop, Process
from kvferry.sim.network import HEARTBEAT_TIMEOUT_S, Link, Network, NetworkWeather

ADDRESS = "tcp://server:1"


class World:
    """A server that echoes, and links to it."""

    def __init__(self, seed: int = 1, **weather) -> None:
        self.loop = EventLoop()
        self.network = Network(self.loop, Random(seed), NetworkWeather(**weather), lambda frame: frame.startswith(b"again"))
        self.processes = {name: Process(self.loop, name) for name in ("server", "client")}
        self.received: list[tuple[bytes, bytes]] = []
        self.answers: list[bytes] = []
        self.num_lost = 0
        self.serve(self.processes["server"])

    def serve(self, process: Process) -> None:
        self.server = self.network.listen(process, ADDRESS, self.on_frame)

    def on_frame(self, identity: bytes, frame: bytes) -> None:
        self.received.append((identity, frame))
        self.server.send(identity, b"re:" + frame)

    def on_lost(self) -> None:
        self.num_lost += 1

    def link(self, *, tells_loss: bool = False) -> Link:
        process = self.processes["client"]
        return Link(self.network, process, ADDRESS, self.answers.append, self.on_lost if tells_loss else None)

    def run(self, seconds: float = 60.0) -> None:
        end = self.loop.now + seconds
        self.loop.call_later(seconds, lambda: None)
        while self.loop.now < end and self.loop.run_next():
            pass

    @property
    def frames(self) -> list[bytes]:
        return [frame for _, frame in self.received]


def send_numbers(link: Link, first: int, last: int) -> list[bytes]:
    frames = [b"%d" % number for number in range(first, last)]
    for frame in frames:
        link.send(frame)
    return frames


@pytest.mark.parametrize("seed", range(5))
def test_frames_of_a_link_keep_their_order_whatever_each_takes(seed):
    world = World(seed, delay_s=0.1, spike_rate=0.5, spike_s=5.0)
    link = world.link()
    world.run(10)
    frames = send_numbers(link, 0, 50)
    world.run()
    assert world.frames == frames
    assert world.answers == [b"re:" + frame for frame in frames]


@pytest.mark.parametrize("seconds", [1.0, HEARTBEAT_TIMEOUT_S - 0.1])
def test_short_partition_only_delays_and_keeps_the_order(seconds):
    world = World(delay_s=0.05)
    link = world.link()
    world.run(1)
    first = send_numbers(link, 0, 10)
    world.network.partition("client", "server", seconds)
    second = send_numbers(link, 10, 20)
    world.run(seconds - 0.01)
    assert len(world.frames) < 10 or world.frames == first
    third = send_numbers(link, 20, 30)
    world.run()
    assert world.frames == first + second + third


def test_long_partition_breaks_the_connection_and_the_link_finds_its_server_again():
    world = World()
    link = world.link()
    world.run(1)
    link.send(b"before")
    world.run(1)
    world.network.partition("client", "server", 20.0)
    link.send(b"during")
    world.run(40)
    link.send(b"after")
    world.run(1)
    assert world.frames == [b"before", b"after"]
    assert len({identity for identity, _ in world.received}) == 2


def test_cut_loses_what_is_under_way_and_tells_once():
    world = World(delay_s=0.0)
    link = world.link(tells_loss=True)
    world.run(1)
    world.network.weather.delay_s = 10.0
    link.send(b"lost")
    assert world.network.cut("server", "client") == 1
    world.run()
    assert world.frames == []
    assert world.num_lost == 1
    link.send(b"too late")
    world.run()
    assert world.frames == []
    assert world.num_lost == 1


def test_link_that_tells_its_loss_queues_while_it_connects():
    world = World()
    link = world.link(tells_loss=True)
    assert link.send(b"early")
    world.run(1)
    assert world.frames == [b"early"]


def test_link_that_reconnects_drops_what_is_sent_meanwhile():
    world = World()
    link = world.link()
    assert not link.send(b"early")
    world.run(1)
    assert world.frames == []
    assert link.num_dropped == 1


def test_address_without_a_process_is_reported_as_lost():
    world = World()
    world.processes["server"].kill()
    world.link(tells_loss=True).send(b"anybody?")
    world.run(1)
    assert world.num_lost == 1


def test_frozen_server_neither_accepts_nor_refuses():
    world = World()
    world.processes["server"].freeze()
    link = world.link(tells_loss=True)
    link.send(b"hello")
    world.run(10)
    assert world.num_lost == 0
    world.processes["server"].thaw()
    world.run(10)
    assert world.frames == [b"hello"]


def test_server_that_never_answers_is_abandoned():
    world = World()
    world.processes["server"].freeze()
    world.link(tells_loss=True)
    world.run(60)
    assert world.num_lost == 1


def test_connection_never_goes_over_to_the_next_process_at_the_address():
    world = World()
    link = world.link(tells_loss=True)
    world.run(1)
    world.processes["server"].kill()
    successor = Process(world.loop, "server")
    world.serve(successor)
    link.send(b"to the dead")
    world.run()
    assert world.frames == []
    assert world.num_lost == 1


def test_frames_that_reached_a_frozen_process_are_read_even_after_its_removal():
    world = World(delay_s=0.0)
    link = world.link()
    world.run(1)
    world.processes["server"].freeze()
    world.network.note_freeze(world.processes["server"], 20.0)
    link.send(b"in the kernel")
    world.run(20)
    world.processes["server"].thaw()
    world.run(10)
    assert world.frames == [b"in the kernel"]
    assert world.answers == []


def test_server_knows_which_connections_are_gone():
    world = World()
    link = world.link()
    world.run(1)
    link.send(b"x")
    world.run(1)
    ((identity, _),) = world.received
    assert world.server.send(identity, b"y")
    world.network.cut("server", "client")
    world.run(1)
    assert not world.server.send(identity, b"z")


def test_only_repeatable_frames_are_repeated_and_right_after_themselves():
    world = World(delay_s=0.1, repeat_rate=1.0)
    link = world.link()
    world.run(1)
    for frame in (b"once", b"again 1", b"again 2"):
        link.send(frame)
    world.run()
    assert world.frames == [b"once", b"again 1", b"again 1", b"again 2", b"again 2"]


def test_closed_link_says_and_hears_nothing():
    world = World(delay_s=0.0)
    link = world.link(tells_loss=True)
    world.run(1)
    link.send(b"last words")
    link.close()
    link.close()
    link.send(b"beyond")
    world.run()
    assert world.frames in ([], [b"last words"])
    assert world.answers == []
    assert world.num_lost == 0
