"""The garbage collector does not scan what a server has loaded."""

import gc
import importlib
import weakref

import pytest

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


@pytest.mark.parametrize(("num_open", "enough"), [(0, 1000), (20, 1200)])
def test_exempt_rings_are_found_once_enough_requests_have_ended(collector, num_open, enough):
    with ShortCollections() as collections:
        for start in (0, enough):
            ring = exempt_ring()
            gc.collect()
            collections.look(num_open, start + enough - 1)
            assert ring() is not None
            collections.look(num_open, start + enough)
            assert ring() is None


def test_collections_are_as_before_at_the_end(collector):
    thresholds, callbacks = gc.get_threshold(), list(gc.callbacks)
    with ShortCollections():
        assert gc.get_threshold() != thresholds
    assert gc.get_threshold() == thresholds
    assert gc.callbacks == callbacks
    kept = Node()
    gc.collect()
    assert nodes_in_sight() == [kept]
