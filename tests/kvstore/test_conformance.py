"""Every way to a store passes the same suite: in this process, in shared memory of another one, by frames."""

import pytest

from kvstore.testing.store_suite import StoreSuite


class TestEmbedded(StoreSuite):
    @pytest.fixture
    def store(self, embedded_store):
        with embedded_store() as store:
            yield store


class TestEmbeddedWithDisk(StoreSuite):
    @pytest.fixture
    def store(self, embedded_store, tmp_path):
        with embedded_store(disk_path=str(tmp_path), disk_bytes=64 << 20) as store:
            yield store


@pytest.mark.slow
class TestClientOnTheSameHost(StoreSuite):
    @pytest.fixture
    def store(self, shared_server, client_of):
        with client_of(shared_server.address) as store:
            yield store


class TestClientElsewhere(StoreSuite):
    @pytest.fixture
    def store(self, shared_server, client_of):
        with client_of(shared_server.address, shares_memory=False) as store:
            yield store
