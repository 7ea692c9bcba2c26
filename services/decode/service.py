"""The decode process: loads the model, then generates until told to stop."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from headwater.kernels.start import start_workers
from headwater.rpc.link import Link
from headwater.rpc.server import Registration, Server, stop_signal
from headwater.services.decode.engine import DecodeEngine
from headwater.services.decode.gauges import observe_decode
from headwater.services.decode.memory_servicer import MemoryServicer
from headwater.services.decode.owner import MemoryOwner
from headwater.services.decode.servicer import DecodeServicer
from headwater.services.decode.step_model import StepBytes, StepModel
from headwater.v1 import decode_service_pb2_grpc, memory_service_pb2_grpc

if TYPE_CHECKING:
    from headwater.config import Config


async def run(config: Config) -> None:
    """Serves until SIGTERM. Raises HeadwaterError when it cannot start."""
    stop = stop_signal()
    model_dir = Path(config.model.path).expanduser()
    owner = MemoryOwner(
        model_dir,
        config.model.name or model_dir.name,
        shm_prefix=config.shm.prefix,
        threads=config.model.load_threads,
        shards=config.model.shards,
        kv=config.kv,
        gpu=config.gpu,
        max_batch=config.decode.max_batch,
        workers=start_workers(
            config.decode.threads, exact_activations=config.model.exact_activations
        ),
    )
    servicer = DecodeServicer(owner)
    server = Server(
        config.decode.listen,
        (
            Registration(
                decode_service_pb2_grpc.add_DecodeServiceServicer_to_server,
                servicer,
                "headwater.v1.DecodeService",
            ),
            Registration(
                memory_service_pb2_grpc.add_MemoryServiceServicer_to_server,
                MemoryServicer(owner),
                "headwater.v1.MemoryService",
            ),
        ),
        Link.of(config),
    )
    await server.start()
    loading = asyncio.create_task(owner.load())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            return
        memory = await loading
        engine = DecodeEngine(
            memory.model,
            memory.prompt_model,
            memory.memory,
            memory.pool,
            StepModel(
                StepBytes.of_model(memory.spec, memory.weights.entries.values(), memory.pool.layout)
            ),
            max_batch=config.decode.max_batch,
            extend_tokens=config.decode.extend_tokens,
        )
        # Before the engine's thread has the workers to itself.
        servicer.read_limit = await asyncio.to_thread(owner.read_limit)
        engine.start(calibrates=True)
        servicer.engine = engine
        observe_decode(owner.model_name, memory.model, engine, memory.pool, servicer.read_limit)
        sweeping = asyncio.create_task(owner.sweep_forever())
        await server.set_ready(True)
        await asyncio.wait((stopping, sweeping), return_when=asyncio.FIRST_COMPLETED)
        sweeping.cancel()
        owner.drain()
        await server.stop(config.decode.grace_seconds)
        engine.stop()
    finally:
        owner.close()
        await server.stop(0)
