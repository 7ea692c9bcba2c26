"""The prefill process: attaches what decode owns, then computes prompts until told to stop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from headwater.kernels.start import start_workers
from headwater.rpc.link import Link
from headwater.rpc.server import Registration, Server, stop_signal
from headwater.services.prefill.attachment import Attachment
from headwater.services.prefill.copy_share import CopyShare
from headwater.services.prefill.decode_watch import DecodeWatch
from headwater.services.prefill.engine import PrefillEngine
from headwater.services.prefill.models import PromptModels
from headwater.services.prefill.servicer import PrefillServicer
from headwater.services.prefill.ways import PassWays
from headwater.telemetry.metrics import observe
from headwater.v1 import prefill_service_pb2_grpc

if TYPE_CHECKING:
    from headwater.config import Config


async def run(config: Config) -> None:
    """Serves until SIGTERM. Raises HeadwaterError when it cannot start."""
    stop = stop_signal()
    link = Link.of(config)
    workers = start_workers(
        config.prefill.threads, exact_activations=config.model.exact_activations
    )
    ways = PassWays(config.prefill.chunk_tokens)
    models = PromptModels(config, workers, ways)
    attachment = Attachment(config.prefill.decode_address, models, link)
    copy_share = CopyShare(config.gpu.copy_share)
    engine = PrefillEngine(
        chunk_tokens=config.prefill.chunk_tokens,
        max_waiting=config.prefill.max_waiting,
        ways=ways,
        streamed_bytes=lambda: models.streamed_bytes,
    )
    watch = DecodeWatch(attachment, ways, models, copy_share, lambda: engine.is_in_pass)
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
            "headwater.prefill.shared_passes": lambda: ways.num_shared,
            "headwater.prefill.gpus": lambda: models.num_gpus,
            "headwater.prefill.copy_share": lambda: copy_share.share,
            "headwater.prefill.lost_ranks": lambda: models.num_lost,
            "headwater.prefill.busy_time": lambda: engine.streaming.busy_seconds,
            "headwater.h2d.copied": lambda: engine.streaming.total,
            "headwater.h2d.rate": engine.streaming.per_second,
            "headwater.ring.occupancy": lambda: models.ring_occupancy,
        }
    )
    attaching = asyncio.create_task(attachment.attach_weights())
    stopping = asyncio.create_task(stop.wait())
    watching = asyncio.create_task(watch.watch_forever())
    try:
        await asyncio.wait((attaching, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            await attaching
            assert attachment.model is not None, "the weights are attached"
            engine.calibrate(models.measurable)
            await server.set_ready(True)
            await stopping
    finally:
        attaching.cancel()
        watching.cancel()
        await server.stop(config.prefill.grace_seconds)
        models.stop()
        engine.stop()
        await attachment.close()
