"""An encode worker's half of EC connector "p2p" in a process of its own: it holds one image until standard input ends.

Run as a program by ``test_p2p_processes``: ``held_by_process.py TRANSPORT INCARNATION CONTROL_ADDRESS NUM_EMBEDS``. Prints its
source as hex.
"""

from __future__ import annotations

import asyncio
import sys

import msgspec

from connectors.ec.p2p import P2PECConnector
from connectors.testing.contexts import ec_context
from connectors.testing.ec_engine import LAYOUT, NamedImage, embed
from core.config_workers import ECConnectorSection, WorkerSection


async def hold(transport: str, incarnation: int, control_address: str, image: NamedImage) -> None:
    context = ec_context(
        "encode",
        engine_id="encoder",
        incarnation=incarnation,
        ec_connector=ECConnectorSection(name="p2p", transports=(transport,), memory_bytes=16 << 20),
        worker=WorkerSection(control_address=control_address),
    )
    connector = P2PECConnector(context)
    connector.worker.register_caches(LAYOUT)
    await connector.start()
    connector.worker.save_caches({image.identifier: embed(image.identifier, image.num_embeds)}, image.identifier)
    (source,) = connector.worker.get_finished(set()).finished_saving.values()
    sys.stdout.write(f"source {msgspec.msgpack.encode(source).hex()}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await connector.stop()


if __name__ == "__main__":
    transport, incarnation, control_address, num_embeds = sys.argv[1:]
    asyncio.run(hold(transport, int(incarnation), control_address, NamedImage("a", int(num_embeds))))
