"""TeamModel: prompts that several ranks compute together, or the first of them alone.

Owns what the ranks are told, and when they are started anew. It has the face of
headwater.model.interface.Model. Between layers hidden states stay where they are: what the caller
holds in their place are the numbers of the batch's rows, and what it drops of these, ranks drop.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwater.errors import HeadwaterError, SegmentError, UnavailableError
from headwater.gpu import rank_wire
from headwater.gpu.team import LAYER_SECONDS, RankSettings, Team

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from headwater.gpu.team import RankProcess
    from headwater.kv.pages import KvPages
    from headwater.kv.writer import KvWriter
    from headwater.model.batch import Batch
    from headwater.model.spec import ModelSpec

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 5.0


class TeamModel:
    """The ranks of `settings` over the model `spec`; one thread at a time may compute.

    `choose` says, at the beginning of each sweep, on how many devices it is computed: one or all.
    `limit` is told which of these there are, and how many tokens a sweep may have, when other ranks
    have begun. `copy_share` is what share of the time copies take, from the next layer on.

    When a rank dies or fails, the sweep ends with its error, all ranks are killed before anybody is
    told, and started again in the background; the next sweep waits for them. Where that fails, the
    first goes on by itself until it is lost, too.
    """

    def __init__(
        self,
        spec: ModelSpec,
        settings: RankSettings,
        choose: Callable[[], int],
        limit: Callable[[Mapping[int, int]], None],
    ) -> None:
        self.spec = spec
        self._settings = settings
        self._choose = choose
        self._limit = limit
        self.copy_share = 1.0
        self._pool: tuple[int, KvWriter] | None = None
        # Of what other threads look at, or end.
        self._lock = threading.Lock()
        # Held while ranks are told what to compute, or are being started.
        self._computing = threading.Lock()
        self._is_closed = False
        self._restart: threading.Thread | None = None
        self._problem: Exception | None = None
        self._failed_at = 0.0
        self._copied = [0] * len(settings.devices)
        self._copied_before = 0
        self.occupancy = 0.0
        self.num_lost = 0
        self._batch: Batch | None = None
        self._at_work: list[RankProcess] = []
        self._team: Team | None = None
        self.max_tokens: dict[int, int] = {}

    def start(self) -> None:
        """Starts the ranks and waits for them. Raises what Team raises."""
        with self._computing:
            self.max_tokens = self._new_team(self._settings).max_tokens
        logger.info(
            "prompts are computed by ranks on %s, over %s; up to %d tokens a sweep, %d by the first"
            " alone",
            ", ".join(self._settings.devices),
            self._settings.transport,
            self.max_tokens[len(self._settings.devices)],
            self.max_tokens[1],
        )

    @property
    def copied_bytes(self) -> int:
        """Bytes of weights copied by all ranks so far."""
        return self._copied_before + sum(self._copied)

    @property
    def rank_pids(self) -> list[int]:
        """Process ids of the ranks; empty while there are none."""
        team = self._team
        return [rank.pid for rank in team.ranks] if team is not None else []

    def use_pool(self, writer: KvWriter) -> None:
        """From the next sweep on entries go to this pool; the one before is let go then."""
        with self._lock:
            number = self._pool[0] + 1 if self._pool is not None else 0
            self._pool = number, writer

    def measured_on(self, num_devices: int) -> PrivateSweeps:
        """The same for made-up prompts, on one device or on all, without a pool."""
        return PrivateSweeps(self, num_devices)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Token ids, int64 [T] -> the numbers of their rows, int64 [T, 1]; begins a sweep."""
        self._batch = None
        return torch.arange(len(token_ids))[:, None]

    def forward_layer(self, index: int, hidden: Tensor, batch: Batch, pages: KvPages) -> Tensor:
        """One layer: numbers of rows [T, 1] -> the same; the layer's KV is in `pages` after.

        After the last layer: FP32 [T, hidden], of which only the rows of each sequence's last token
        are there. Raises UnavailableError when a rank is gone, and whatever one of them raises.
        """
        return self.compute(index, hidden, batch, pages, None)

    def compute(
        self, index: int, hidden: Tensor, batch: Batch, pages: KvPages, num_devices: int | None
    ) -> Tensor:
        """See forward_layer; `num_devices` of a made-up prompt, whose `pages` are not looked at."""
        with self._computing:
            return self._compute(index, hidden, batch, pages, num_devices)

    def _compute(
        self, index: int, hidden: Tensor, batch: Batch, pages: KvPages, num_devices: int | None
    ) -> Tensor:
        team = self._ready_team()
        if self._batch is None and not team.is_whole:
            # Nobody waits for it: a rank that died in its sleep costs no prompt.
            self._give_up(team, UnavailableError("a rank died between prompts"))
            team = self._ready_team()
        pool = None
        if self._batch is None and num_devices is None:
            pool = self._pool_of(pages)
        try:
            if self._batch is None:
                self._begin(team, batch, pages.block_tokens, pool, num_devices)
                kept = None
            else:
                kept = _kept_spans(self._batch, batch, hidden)
            return self._layer(team, index, batch, kept)
        except Exception as error:
            self._give_up(team, error)
            if self._is_closed:
                raise _closed() from error
            raise

    def forward(self, batch: Batch, pages: KvPages) -> Tensor:
        """All layers; see forward_layer for what is in the result."""
        hidden = self.embed(batch.token_ids)
        for index in range(self.spec.num_layers):
            hidden = self.forward_layer(index, hidden, batch, pages)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:  # noqa: ARG002
        """Prefill never samples. Raises UnavailableError."""
        raise UnavailableError("gpu: ranks compute prompts; decode computes logits")

    def stop(self) -> None:
        """Kills the ranks, and starts none any more; whoever waits for them is told soon."""
        with self._lock:
            self._is_closed = True
            if self._team is not None:
                self._team.kill()

    def close(self) -> None:
        """The same, and waits until all are gone; any thread may call it, at any time."""
        self.stop()
        with self._lock:
            restart = self._restart
        if restart is not None:
            restart.join()
        with self._computing:
            if self._team is not None:
                self._team.end()
            self._team = None

    def _begin(
        self,
        team: Team,
        batch: Batch,
        block_tokens: int,
        pool: tuple[int, KvWriter] | None,
        num_devices: int | None,
    ) -> None:
        if pool is not None:
            self._attach(team, *pool)
        width = self._choose() if num_devices is None else num_devices
        self._at_work = team.ranks if width > 1 else team.ranks[:1]
        spans, payload = rank_wire.batch_fields(batch)
        fields = {
            "what": "sweep",
            "is_alone": width == 1,
            "pool": None if pool is None else pool[0],
            "spans": spans,
            "block_tokens": block_tokens,
            "copy_share": self.copy_share,
        }
        team.tell(self._at_work, fields, payload)
        self._batch = batch

    def _pool_of(self, pages: KvPages) -> tuple[int, KvWriter]:
        """The pool of `pages`, and its number."""
        with self._lock:
            if self._pool is None or self._pool[1].memory.pages is not pages:
                raise SegmentError("the KV pool of the prompt has been replaced; ask for a lease")
            return self._pool

    @staticmethod
    def _attach(team: Team, number: int, writer: KvWriter) -> None:
        """All ranks have the pool from now on."""
        if team.pool_number != number:
            fields = {
                "what": "pool",
                "number": number,
                "handle": rank_wire.handle_fields(writer.handle),
                "layout": rank_wire.layout_fields(writer.memory.layout),
            }
            team.tell(team.ranks, fields, file_descriptors=(writer.fileno(),))
            team.answers(team.ranks, LAYER_SECONDS)
            team.pool_number = number

    def _layer(self, team: Team, index: int, batch: Batch, kept: list[int] | None) -> Tensor:
        fields = {"what": "layer", "index": index, "copy_share": self.copy_share}
        if kept is not None:
            fields["kept"] = kept
        team.tell(self._at_work, fields)
        found = team.answers(self._at_work, LAYER_SECONDS)
        for number, answer in enumerate(found):
            self._copied[number] = int(answer.fields["copied_bytes"])
        self.occupancy = float(found[0].fields["occupancy"])
        self._batch = batch
        rows = len(batch.token_ids)
        if index < self.spec.num_layers - 1:
            return torch.arange(rows)[:, None]
        # Memory that nobody touches is never really taken.
        states = torch.empty(rows, self.spec.hidden_size)
        states[batch.last_rows] = rank_wire.states_of(found[0].payload, self.spec.hidden_size)
        self._batch = None
        return states

    def _ready_team(self) -> Team:
        """Raises UnavailableError when there is none and none can be had."""
        with self._lock:
            restart, is_closed = self._restart, self._is_closed
        if restart is not None:
            restart.join()
        if self._team is None and not is_closed:
            if time.monotonic() - self._failed_at > _RETRY_SECONDS:
                self._start_again()
            problem = self._problem
            raise UnavailableError(
                f"gpu: the ranks could not be started again: {problem}; try again later"
            )
        if self._team is None:
            raise _closed()
        return self._team

    def _give_up(self, team: Team, error: Exception) -> None:
        """Ends all ranks, so that none writes any more, and starts others."""
        pids = [rank.pid for rank in team.ranks]
        team.end()
        self._team, self._batch = None, None
        self._copied_before += sum(self._copied)
        self._copied = [0] * len(self._copied)
        if self._is_closed:
            return
        self.num_lost += 1
        logger.warning("the ranks %s are ended and started again: %s", pids, error)
        self._start_again()

    def _start_again(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._restart = threading.Thread(target=self._start, name="start-ranks", daemon=True)
            self._restart.start()

    def _start(self) -> None:
        began_at = time.monotonic()
        try:
            most = self._other_team().max_tokens
            if most != self.max_tokens:
                self.max_tokens = most
                self._limit(most)
            logger.info("the ranks are back, after %.1f s", time.monotonic() - began_at)
        except Exception as problem:
            self._problem, self._failed_at = problem, time.monotonic()
            if not self._is_closed:
                logger.error("the ranks could not be started again: %s", problem)
        with self._lock:
            self._restart = None

    def _other_team(self) -> Team:
        """All ranks, or the first by itself: another's device may be broken for good."""
        try:
            return self._new_team(self._settings)
        except HeadwaterError as problem:
            if self._is_closed:
                raise
            first = self._settings.devices[:1]
            logger.error(
                "the ranks could not be started again: %s; prompts are computed on %s alone until "
                "prefill is started anew",
                problem,
                *first,
            )
            return self._new_team(dataclasses.replace(self._settings, devices=first))

    def _new_team(self, settings: RankSettings) -> Team:
        """Ranks that are ready; `stop` ends them meanwhile, too."""
        with self._lock:
            if self._is_closed:
                raise _closed()
            team = self._team = Team(settings)
        try:
            team.wait_until_ready()
        except BaseException as error:
            self._team = None
            if self._is_closed:
                raise _closed() from error
            raise
        return team


def _closed() -> UnavailableError:
    return UnavailableError("gpu: prefill is stopping, or takes other weights; try again")


class PrivateSweeps:
    """A TeamModel's face for made-up prompts, on a given number of devices."""

    def __init__(self, team: TeamModel, num_devices: int) -> None:
        self.spec = team.spec
        self._team = team
        self._num_devices = num_devices

    def embed(self, token_ids: Tensor) -> Tensor:
        """See TeamModel."""
        return self._team.embed(token_ids)

    def forward_layer(self, index: int, hidden: Tensor, batch: Batch, pages: KvPages) -> Tensor:
        """See TeamModel; nothing is written to `pages`."""
        return self._team.compute(index, hidden, batch, pages, self._num_devices)

    def forward(self, batch: Batch, pages: KvPages) -> Tensor:
        """See TeamModel."""
        hidden = self.embed(batch.token_ids)
        for index in range(self.spec.num_layers):
            hidden = self.forward_layer(index, hidden, batch, pages)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """See TeamModel."""
        return self._team.logits(hidden)


def _kept_spans(before: Batch, now: Batch, rows: Tensor) -> list[int] | None:
    """The numbers of the spans of `before` that are left in `now`; None: all of them.

    `rows`, [T, 1], are the rows of `before` that the caller has kept.
    """
    if now is before:
        return None
    numbers = {span.first_row: number for number, span in enumerate(before.spans)}
    return [numbers[int(rows[span.first_row])] for span in now.spans]
