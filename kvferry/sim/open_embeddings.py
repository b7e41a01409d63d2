"""Chooses the EC connector of a simulated worker."""

from __future__ import annotations

from connectors.p2p.producer.handshake import WorkerIdentity
from core.ids import SeededIds
from kvferry.sim.ec import Embeddings
from kvferry.sim.embeddings import SimEmbeddings
from kvferry.sim.host import Host
from kvferry.sim.plan import ClusterPlan, WorkerPlan
from kvferry.sim.shared_embeddings import SimSharedEmbeddings
from kvferry.sim.stores import SimStores


def open_embeddings(
    host: Host, identity: WorkerIdentity, plan: ClusterPlan, spec: WorkerPlan, ids: SeededIds, stores: SimStores
) -> Embeddings:
    """Return the connector of a worker, in a run with images."""
    images, is_encoder = plan.images, spec.role == "encode"
    assert images is not None, "there are images to embed"
    if images.connector == "shared":
        return SimSharedEmbeddings(host, identity, images, stores.of_embeddings(), ids, is_encoder=is_encoder)
    return SimEmbeddings(host, identity, images, plan.config.connector, ids, spec.control_address if is_encoder else "")
