"""The ranks of one prefill process: started together, watched, ended together.

Owns the child processes. The prefill process itself touches no GPU: whatever happens to one rank, a
hanging driver included, all are killed and started anew. Once `end` returns, no rank writes to the
pool any more. Nothing of theirs has a name, so that nothing is left behind, however they end.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from headwater import errors
from headwater.errors import HeadwaterError, ResourceError, UnavailableError
from headwater.gpu import rank_wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headwater.config import TelemetryConfig
    from headwater.gpu.rank_wire import Message
    from headwater.shm import SegmentHandle

logger = logging.getLogger(__name__)

# Libraries, kernels and connections; and the longest that a layer may take.
START_SECONDS = 300.0
LAYER_SECONDS = 300.0
# A rank takes and gives messages between layers; the longest that one may be on its way.
MESSAGE_SECONDS = 60.0
# Connections close before a process is gone.
_DEATH_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class RankSettings:
    """What all ranks are told at the start; see GpuConfig. `threads` is for each of them."""

    devices: tuple[str, ...]
    weights: SegmentHandle
    vram_gib: float
    sweep_tokens: int
    quantize_from: int
    threads: int
    telemetry: TelemetryConfig

    @property
    def transport(self) -> str:
        """NCCL, unless ranks are on CPUs or share a device."""
        is_apart = len(set(self.devices)) == len(self.devices)
        return "nccl" if is_apart and self.devices[0] != "cpu" else "gloo"


class RankProcess:
    """One child and our ends of what ties it to us."""

    def __init__(self, meeting: int) -> None:
        """`meeting` is the open file in which the ranks meet. Raises ResourceError."""
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(MESSAGE_SECONDS)
        lifeline, self._lifeline = os.pipe()
        descriptors = theirs.fileno(), lifeline, meeting
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "headwater.gpu.rank", *map(str, descriptors)],
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
            )
        except OSError as failure:
            self._let_go()
            raise ResourceError(
                f"gpu: a rank of prefill cannot be started: {failure}; raise the limits of "
                "processes and memory, or name one device in gpu.prefill_devices"
            ) from failure
        finally:
            theirs.close()
            os.close(lifeline)

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    def has_died(self, seconds: float) -> bool:
        """Whether it ends within so long."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """Ends it, whatever it does; it may take a moment until `wait` returns."""
        self._process.kill()

    def wait(self) -> None:
        """Waits until it is gone, and lets go of what tied it to us."""
        self._process.wait()
        self._let_go()

    def _let_go(self) -> None:
        self.socket.close()
        os.close(self._lifeline)


class Team:
    """Ranks of `settings` that start, and are ready when `wait_until_ready` returns.

    `max_tokens` is then what the first can do alone, and all together. One thread at a time, but
    any may `kill`.
    """

    def __init__(self, settings: RankSettings) -> None:
        """Raises ResourceError or UnavailableError."""
        self.ranks: list[RankProcess] = []
        # The pool that all ranks have attached; see TeamModel.
        self.pool_number: int | None = None
        self.max_tokens: dict[int, int] = {}
        # A file without a name: ranks open it through their descriptor of it.
        meeting = os.memfd_create("headwater-meeting")
        try:
            for _ in settings.devices:
                self.ranks.append(RankProcess(meeting))
            for number, (rank, device) in enumerate(zip(self.ranks, settings.devices, strict=True)):
                setup = {
                    "what": "setup",
                    "rank": number,
                    "world_size": len(settings.devices),
                    "device": device,
                    "transport": settings.transport,
                    "weights": rank_wire.handle_fields(settings.weights),
                    "vram_gib": settings.vram_gib,
                    "sweep_tokens": settings.sweep_tokens,
                    "quantize_from": settings.quantize_from,
                    "threads": settings.threads,
                    "telemetry": asdict(settings.telemetry),
                }
                rank_wire.send(rank.socket, setup)
        except BaseException:
            self.end()
            raise
        finally:
            os.close(meeting)

    def wait_until_ready(self) -> None:
        """Ends all ranks if one cannot start, and raises its error.

        That is ConfigError, ResourceError, SegmentError, or UnavailableError when one is gone.
        """
        try:
            found = self.answers(self.ranks, START_SECONDS)
        except BaseException:
            self.end()
            raise
        most = [int(answer.fields["max_tokens"]) for answer in found]
        self.max_tokens = {1: most[0], len(most): min(most)}

    def tell(
        self,
        ranks: Sequence[RankProcess],
        fields: dict[str, Any],
        payload: bytes = b"",
        file_descriptors: Sequence[int] = (),
    ) -> None:
        """Sends a message to some ranks. Raises UnavailableError when one is gone, or hangs."""
        for rank in ranks:
            try:
                rank_wire.send(rank.socket, fields, payload, file_descriptors)
            except UnavailableError:
                # It may have said why before it went.
                self.answers([rank], _DEATH_SECONDS)
                raise self._lost(rank) from None

    def answers(self, ranks: Sequence[RankProcess], seconds: float) -> list[Message]:
        """Waits for a message of each of some ranks, and looks at all of them meanwhile.

        Raises the error that a rank tells, UnavailableError when one is gone or says nothing for
        so long.
        """
        found: dict[int, Message] = {}
        waiting = select.poll()
        by_descriptor = {rank.socket.fileno(): rank for rank in self.ranks}
        for descriptor in by_descriptor:
            waiting.register(descriptor, select.POLLIN)
        wanted = {self.ranks.index(rank) for rank in ranks}
        deadline = time.monotonic() + seconds
        while wanted - found.keys():
            ready = waiting.poll(max(0.0, deadline - time.monotonic()) * 1e3)
            if not ready:
                raise UnavailableError(
                    f"gpu: the ranks of prefill said nothing for {seconds:.0f} s; they are started "
                    "again"
                )
            for descriptor, _ in ready:
                rank = by_descriptor[descriptor]
                try:
                    message = rank_wire.receive(rank.socket)
                except UnavailableError:
                    raise self._lost(rank) from None
                if message.what == "failed":
                    raise self._cause_of(rank, message)
                found[self.ranks.index(rank)] = message
        return [found[self.ranks.index(rank)] for rank in ranks]

    @property
    def is_whole(self) -> bool:
        """Whether all ranks run."""
        return all(rank.is_alive for rank in self.ranks)

    def kill(self) -> None:
        """Whoever waits for a rank is told soon that it is gone; `end` is still to be called."""
        for rank in self.ranks:
            rank.kill()

    def end(self) -> None:
        """Kills all ranks and waits until they are gone."""
        self.kill()
        for rank in self.ranks:
            rank.wait()
        self.ranks = []

    def _cause_of(self, rank: RankProcess, message: Message) -> HeadwaterError:
        """What a rank tells, or that another has died, which is often why."""
        error = _error_of(message)
        if isinstance(error, UnavailableError):
            others = (other for other in self.ranks if other is not rank)
            dead = next((other for other in others if other.has_died(_DEATH_SECONDS)), None)
            if dead is not None:
                return self._lost(dead)
        return error

    def _lost(self, rank: RankProcess) -> UnavailableError:
        number = self.ranks.index(rank)
        return UnavailableError(
            f"gpu: rank {number} of {len(self.ranks)} (pid {rank.pid}) died; its prompts are given "
            "up and the ranks are started again"
        )


def _error_of(message: Message) -> HeadwaterError:
    kind = getattr(errors, message.fields["kind"], errors.InternalError)
    text = str(message.fields["message"])
    try:
        error: HeadwaterError = kind(text)
    except TypeError:
        return errors.InternalError(text)
    return error
