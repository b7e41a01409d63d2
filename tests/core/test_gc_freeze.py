"""The garbage collector does not scan what a server has loaded."""

import gc
import importlib
import weakref

import pytest

from core import gc_freeze
from core.config import load_config
from core.errors import ConfigError
from core.gc_freeze import ShortCollections, freeze_loaded_objects, without_collections
from core.worker.engine_worker import run_worker


class Node:
    """Garbage that only the collector finds, if nothing else refers to it."""

    def __init__(self):
        self.itself = self


@pytest.fixture
def collector():
    yield
    gc.unfreeze()
    freeze_loaded_objects()  # as tests/conftest.py does once


def nodes_in_sight():
    return [found for found in gc.get_objects() if type(found) is Node]


@pytest.mark.slow
def test_what_is_loaded_is_out_of_sight_and_what_comes_later_is_not(collector):
    kept = Node()
    assert nodes_in_sight() == [kept]
    freeze_loaded_objects()
    assert nodes_in_sight() == []
    later = Node()
    assert nodes_in_sight() == [later]


def test_worker_is_frozen_when_it_is_loaded_and_before_it_serves(monkeypatch):
    journal = []

    def freeze():
        journal.append("frozen")
        raise ConfigError("enough")

    monkeypatch.setattr("core.worker.engine_worker.freeze_loaded_objects", freeze)
    with pytest.raises(ConfigError, match="enough"):
        run_worker(
            load_config(overrides={"worker.ops_port": 0}),
            "decode",
            lambda context: journal.append("loaded"),
            lambda found: None,
        )
    assert journal == ["loaded", "frozen"]


@pytest.mark.slow
def test_garbage_is_not_kept_forever(collector):
    Node()
    freeze_loaded_objects()
    gc.unfreeze()
    assert nodes_in_sight() == []


def test_nothing_is_collected_while_libraries_are_imported_and_again_afterwards():
    with pytest.raises(ModuleNotFoundError), without_collections():
        importlib.import_module("no_such_module" if not gc.isenabled() else "gc")
    assert gc.isenabled()


# ---- a process with many requests open -----------------------------------------------------------------------------------


def test_a_full_collection_visits_only_what_is_new(collector):
    with ShortCollections():
        kept = Node()
        gc.collect()
        assert nodes_in_sight() == []
        later = Node()
        assert nodes_in_sight() == [later]
    assert kept is not later


def exempt_ring():
    """Return a reference to garbage that became garbage only when it was exempt."""
    node = Node()
    gc.collect()
    return weakref.ref(node)


def has_found(ring, collections, num_open):
    gc.collect()
    collections.look(num_open)
    return ring() is None


@pytest.mark.parametrize("num_open", [0, 10])
def test_exempt_rings_are_found_once_there_are_more_objects_than_requests_explain(collector, monkeypatch, num_open):
    with ShortCollections() as collections:
        ring = exempt_ring()
        gc.collect()
        most = gc.get_freeze_count() - gc_freeze._OBJECTS_PER_OPEN * num_open
        collections._most_exempt = most + 1000
        assert not has_found(ring, collections, num_open)
        more = [[] for _ in range(1000)]
        assert not has_found(ring, collections, num_open + 8)
        assert has_found(ring, collections, num_open)
        assert len(more) == 1000


def test_a_search_in_vain_is_not_repeated_before_there_is_twice_as_much(collector, monkeypatch):
    monkeypatch.setattr(gc_freeze, "_LEAST_EXEMPT", 0)
    with ShortCollections() as collections:
        gc.collect()
        collections.look(0)
        ring = exempt_ring()
        assert not has_found(ring, collections, 0)
        kept = [[] for _ in range(2 * gc.get_freeze_count())]
        assert has_found(ring, collections, 0)
        assert kept


def test_collections_are_as_before_at_the_end(collector):
    thresholds, callbacks = gc.get_threshold(), list(gc.callbacks)
    with ShortCollections():
        assert gc.get_threshold() != thresholds
    assert gc.get_threshold() == thresholds
    assert gc.callbacks == callbacks
    kept = Node()
    gc.collect()
    assert nodes_in_sight() == [kept]
