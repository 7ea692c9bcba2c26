"""The prefill process: attaches what decode owns, then computes prompts until told to stop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from headwater.kernels.start import start_workers
from headwater.rpc.link import Link
from headwater.rpc.server import Registration, Server, stop_signal
from headwater.services.prefill.attachment import Attachment
from headwater.services.prefill.engine import PrefillEngine
from headwater.services.prefill.models import PromptModels
from headwater.services.prefill.servicer import PrefillServicer
from headwater.telemetry.metrics import observe
from headwater.v1 import prefill_service_pb2_grpc

if TYPE_CHECKING:
    from headwater.config import Config


async def run(config: Config) -> None:
    """Serves until SIGTERM. Raises HeadwaterError when it cannot start."""
    stop = stop_signal()
    link = Link.of(config)
    workers = start_workers(config.prefill.threads)
    models = PromptModels(config.gpu, workers)
    attachment = Attachment(config.prefill.decode_address, models, link)
    engine = PrefillEngine(
        chunk_tokens=config.prefill.chunk_tokens,
        max_waiting=config.prefill.max_waiting,
        streamed_bytes=lambda: models.streamed_bytes,
    )
    server = Server(
        config.prefill.listen,
        (
            Registration(
                prefill_service_pb2_grpc.add_PrefillServiceServicer_to_server,
                PrefillServicer(attachment, engine, models),
                "headwater.v1.PrefillService",
            ),
        ),
        link,
    )
    await server.start()
    engine.start()
    observe(
        {
            "headwater.prefill.running_requests": lambda: engine.num_running,
            "headwater.prefill.waiting_requests": lambda: engine.num_waiting,
            "headwater.prefill.pending_tokens": lambda: engine.num_pending_tokens,
            "headwater.prefill.computed_tokens": lambda: engine.computed.total,
            "headwater.prefill.passes": lambda: engine.num_passes,
            "headwater.prefill.busy_time": lambda: engine.streaming.busy_seconds,
            "headwater.h2d.copied": lambda: engine.streaming.total,
            "headwater.h2d.rate": engine.streaming.per_second,
            "headwater.ring.occupancy": lambda: models.ring_occupancy,
        }
    )
    attaching = asyncio.create_task(attachment.attach_weights())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((attaching, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            await attaching
            assert attachment.model is not None, "the weights are attached"
            if models.max_tokens is not None:
                engine.use_passes_of(models.max_tokens)
            engine.calibrate(attachment.model)
            await server.set_ready(True)
            await stopping
    finally:
        attaching.cancel()
        await server.stop(config.prefill.grace_seconds)
        engine.stop()
        await attachment.close()
