"""Contexts of ZeroMQ that have started: without descriptors a socket is an error, and not the end of the process."""

import pytest

from tests.support.descriptors import run_program

LATER = """
import sys, zmq, zmq.asyncio
from core.wire.contexts import started_context
from tests.support.descriptors import leave_descriptors

context = started_context({kind})
leave_descriptors(int(sys.argv[1]))
try:
    context.socket(zmq.DEALER, socket_class=zmq.Socket)
except zmq.ZMQError as error:
    print(error)
context.destroy(linger=0)
"""
AT_ONCE = """
import sys, zmq
from core.errors import ConfigError
from core.wire.contexts import started_context
from tests.support.descriptors import leave_descriptors

leave_descriptors(int(sys.argv[1]))
try:
    started_context(zmq.Context).destroy(linger=0)
except ConfigError as error:
    print(error)
"""


@pytest.mark.parametrize("kind", ["zmq.Context", "zmq.asyncio.Context"])
@pytest.mark.parametrize("num_free", range(2))
def test_started_context_needs_one_descriptor_for_a_socket(kind, num_free):
    ended = run_program(LATER.format(kind=kind), num_free)
    assert (ended.returncode, ended.stdout) == (0, "" if num_free else "Too many open files\n"), ended.stderr


@pytest.mark.parametrize("num_free", range(9))
def test_context_that_finds_too_few_descriptors_names_the_limit(num_free):
    ended = run_program(AT_ONCE, num_free)
    assert (ended.returncode, "`ulimit -n`" in ended.stdout) == (0, num_free < 8), ended.stderr
