"""The encode role as a process: the image half of a model, without its decoder and without a KV pool.

Builds the worker. ``encode.role`` handles its requests and ``encode.engine`` computes embeddings; sockets, drain and the
operations port are those of every worker (``core.worker.process``).
"""

from __future__ import annotations

import logging
from pathlib import Path

from connectors.registry import ec_connector_factory
from core.config import KVFerryConfig
from core.connector import WorkerContext
from core.ec_connector import ECContext, check_ec_connector
from core.engine.build import apply_cpu_threads, device_of, dtype_of
from core.engine.media.image_decode_thread import ImageDecodeThread
from core.errors import ConfigError
from core.log import event
from core.model.arch import parse_arch
from core.model.hub import resolve_model
from core.model.image_encoder import load_image_encoder
from core.worker.builder import Assembled, BuiltEncoder
from core.worker.engine_worker import run_worker
from core.worker.parts import Announce
from encode.engine import EncodeEngine
from encode.metrics import EncodeMetrics
from encode.role import EncodeHandler

logger = logging.getLogger(__name__)


def run(config: KVFerryConfig, announce: Announce) -> int:
    """Run an encode worker process until it leaves; returns its exit code.

    Raises:
        KVFerryError: it cannot start.
    """
    return run_worker(config, "encode", put_together, announce)


def put_together(context: WorkerContext) -> Assembled:
    """Load the image half of the model and put engine, connector and handler together.

    Raises:
        ConfigError: the model sees no images, or ``ec_connector.name`` leaves no way to read the embeddings
            or names a factory that makes no connector.
    """
    config = context.config
    make_connector = ec_connector_factory(config.ec_connector.name)
    apply_cpu_threads(config.worker)
    files = resolve_model(config.model.name, Path(config.model.cache_dir))
    device = device_of(config.model)
    dtype = dtype_of(config.model, parse_arch(files.config), device)
    encoder = load_image_encoder(files, dtype, device, config.model.quantization)
    if encoder is None:
        raise ConfigError(f"model.name = {config.model.name}: it reads text only, an encode worker has nothing to do")
    if make_connector is None:
        raise ConfigError(
            "ec_connector.name = none: no worker could read what an encode worker computes; say p2p or shared, on all workers",
            param="ec_connector.name",
        )
    made = make_connector(ECContext(**vars(context), model_fingerprint=encoder.model_fingerprint))
    connector = check_ec_connector(made, config.ec_connector.name, only_computes=True)
    image_decode_thread = ImageDecodeThread(encoder)
    engine = EncodeEngine(
        encoder,
        connector.worker,
        image_decode_thread,
        EncodeMetrics(context.metrics),
        context.clock,
        max_batch_images=config.encode.max_batch_images,
        by_priority=config.scheduler.policy == "priority",
    )
    built = BuiltEncoder(
        engine=engine,
        model_fingerprint=encoder.model_fingerprint,
        image_decode_thread=image_decode_thread,
        max_num_images=config.encode.max_batch_images + config.worker.max_waiting_requests,
    )
    logger.info(event("encoder_built", model=files.name, dtype=encoder.layout.dtype, device=encoder.layout.device))
    return Assembled(built, None, EncodeHandler(), connector)
