"""What a server has loaded is not looked through again."""

import gc

import pytest

from core.garbage import freeze_what_is_loaded


class Node:
    """Garbage that only the collector finds, if nothing else refers to it."""

    def __init__(self):
        self.itself = self


@pytest.fixture
def collector():
    yield
    gc.unfreeze()


def nodes_in_sight():
    return [found for found in gc.get_objects() if type(found) is Node]


def test_what_is_loaded_is_out_of_sight_and_what_comes_later_is_not(collector):
    kept = Node()
    assert nodes_in_sight() == [kept]
    freeze_what_is_loaded()
    assert nodes_in_sight() == []
    later = Node()
    assert nodes_in_sight() == [later]


def test_garbage_is_not_kept_for_ever(collector):
    Node()
    freeze_what_is_loaded()
    gc.unfreeze()
    assert nodes_in_sight() == []
