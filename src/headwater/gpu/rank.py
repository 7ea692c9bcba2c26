"""One rank: a process that computes its part of every prompt, as the prefill process tells it.

`python -m headwater.gpu.rank CONTROL LIFELINE MEETING`, numbers of inherited file descriptors: of a
socket for messages (rank_wire.py), of a pipe whose end means that the prefill process is gone, and
of a file in which the ranks find one another (peers.py).
Owns a device, the attached weights and the pool that it writes its rows' entries to. It decides
nothing: what is wrong is told, and the prefill process ends all ranks together.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headwater.config import TelemetryConfig
from headwater.errors import HeadwaterError, InternalError, UnavailableError
from headwater.gpu import rank_wire
from headwater.gpu.device import find_device
from headwater.gpu.exchange import Exchange
from headwater.gpu.peers import Peers
from headwater.gpu.prefill_model import StreamedModel
from headwater.gpu.prefill_session import PrefillSession
from headwater.kv.layout import KvLayout
from headwater.kv.pages import KvPages
from headwater.kv.writer import KvWriter
from headwater.model.batch import Batch
from headwater.model.spec import ModelSpec
from headwater.shm import Segment
from headwater.telemetry.logs import configure_logging
from headwater.weights.store import WeightsStore

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Sweep:
    """The sweep under way."""

    model: StreamedModel
    batch: Batch
    pages: KvPages
    hidden: torch.Tensor


class Rank:
    """Answers each message, but `sweep`, which the first layer's answer answers too."""

    def __init__(self, control: socket.socket, meeting: Path, setup: dict[str, Any]) -> None:
        """Raises HeadwaterError when device, weights or the other ranks are not as they must be."""
        self._control = control
        self.rank, self.world_size = int(setup["rank"]), int(setup["world_size"])
        segment = Segment.attach_handle(rank_wire.handle_of(setup["weights"]))
        self._store = WeightsStore.from_segment(segment)
        self.spec = ModelSpec.from_json(self._store.config_json, "config.json")
        gpu = find_device(setup["device"], setup["vram_gib"])
        if gpu.device.type == "cuda":
            torch.cuda.set_device(gpu.device)
        torch.set_num_threads(setup["threads"])
        peers: Peers | None = None
        if self.world_size > 1:
            peers = Peers.meet(meeting, self.rank, self.world_size, setup["transport"])
        self._session = PrefillSession(
            self.spec,
            self._store,
            gpu,
            wanted_tokens=setup["sweep_tokens"],
            quantize_from=setup["quantize_from"],
            exchange=Exchange(peers) if peers is not None else None,
        )
        if peers is not None:
            # The first transfer makes the connections, which takes seconds.
            peers.barrier()
        self.max_tokens = self._session.plan.max_tokens
        self._pool: tuple[int, KvWriter, int] | None = None
        self._sweep: _Sweep | None = None

    def serve(self) -> None:
        """Until the other end closes."""
        answers = {"pool": self._attach_pool, "sweep": self._begin_sweep, "layer": self._layer}
        with torch.inference_mode():
            while True:
                try:
                    message = rank_wire.receive(self._control)
                except UnavailableError:
                    return
                answers[message.what](message)

    def _attach_pool(self, message: rank_wire.Message) -> None:
        fields = message.fields
        self._detach_pool()
        # The prefill process's open file, on which its writer locks hang: should it die, blocks
        # that this rank may still write to stay locked until it is gone too.
        (held,) = message.file_descriptors
        handle, layout = fields["handle"], rank_wire.layout_of(fields["layout"])
        writer = KvWriter(rank_wire.handle_of(handle), layout)
        self._pool = int(fields["number"]), writer, held
        rank_wire.send(self._control, {"what": "attached"})

    def _detach_pool(self) -> None:
        if self._pool is not None:
            _, writer, held = self._pool
            self._pool = None
            writer.close()
            os.close(held)

    def _begin_sweep(self, message: rank_wire.Message) -> None:
        fields = message.fields
        batch = rank_wire.batch_of(fields["spans"], message.payload, fields["block_tokens"])
        model = self._session.model
        if fields["is_alone"] and self._session.alone is not None:
            model = self._session.alone
        self._session.switch_to(model)
        pages = self._pages_of(fields["pool"], batch, fields["block_tokens"])
        model.streamer.share = fields["copy_share"]
        self._sweep = _Sweep(model, batch, pages, model.embed(batch.token_ids))

    def _pages_of(self, pool: int | None, batch: Batch, block_tokens: int) -> KvPages:
        """The pages of an attached pool; None: private ones, for made-up prompts."""
        if pool is None:
            most = max(int(span.block_ids.max()) for span in batch.spans) + 1
            layout = KvLayout.of(self.spec, num_blocks=most, block_tokens=block_tokens)
            return KvPages.allocate(layout)
        if self._pool is None or self._pool[0] != pool:
            raise InternalError(f"rank {self.rank}: pool {pool} is not attached")
        return self._pool[1].memory.pages

    def _layer(self, message: rank_wire.Message) -> None:
        sweep, fields = self._sweep, message.fields
        if sweep is None:
            raise InternalError(f"rank {self.rank}: no sweep has begun")
        if "kept" in fields:
            self._keep(sweep, fields["kept"])
        sweep.model.streamer.share = fields["copy_share"]
        index = int(fields["index"])
        sweep.hidden = sweep.model.forward_layer(index, sweep.hidden, sweep.batch, sweep.pages)
        payload = b""
        if index == self.spec.num_layers - 1:
            if self.rank == 0:
                last = sweep.hidden[sweep.batch.last_rows.to(sweep.hidden.device)]
                payload = rank_wire.states_payload(last)
            self._sweep = None
        streamer = sweep.model.streamer
        answer = {
            "what": "done",
            "copied_bytes": self._session.copied_bytes,
            "occupancy": streamer.occupancy,
        }
        rank_wire.send(self._control, answer, payload)

    @staticmethod
    def _keep(sweep: _Sweep, kept: list[int]) -> None:
        """Goes on with some of the sequences."""
        sweep.hidden = sweep.model.keep(sweep.hidden, kept)
        spans = [sweep.batch.spans[index] for index in kept]
        sweep.batch = sweep.batch.restricted(spans).batch


def main() -> None:
    """Runs until the prefill process ends it, or is gone."""
    # A terminal and some service managers tell everybody to stop; prompts under way go on.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    _die_with(int(sys.argv[2]))
    try:
        setup = rank_wire.receive(control).fields
    except UnavailableError:
        # The team was given up before it was one.
        return
    configure_logging(f"prefill rank {setup['rank']}", TelemetryConfig(**setup["telemetry"]))
    try:
        rank = Rank(control, Path(f"/proc/self/fd/{sys.argv[3]}"), setup)
        rank_wire.send(control, {"what": "ready", "max_tokens": rank.max_tokens})
        rank.serve()
    except Exception as failure:
        if not isinstance(failure, HeadwaterError):
            logger.exception("rank %d failed", setup["rank"])
        error = failure if isinstance(failure, HeadwaterError) else InternalError(repr(failure))
        _tell(control, error)
    # Threads of the libraries may wait for ranks that are gone.
    logging.shutdown()
    os._exit(0)


def _tell(control: socket.socket, error: HeadwaterError) -> None:
    fields = {"what": "failed", "kind": type(error).__name__, "message": str(error)}
    try:
        rank_wire.send(control, fields)
        # Nothing is lost on its way to whoever closes next.
        control.shutdown(socket.SHUT_WR)
        control.recv(1)
    except (OSError, UnavailableError):
        logger.warning("nobody is there to tell: %s", error)


def _die_with(lifeline: int) -> None:
    """Ends this process at once when the other end of the pipe is closed."""

    def watch() -> None:
        os.read(lifeline, 1)
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


if __name__ == "__main__":
    main()
