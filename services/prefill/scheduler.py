"""Which prompts the next pass over the weights computes, and how much of each.

Higher priorities first; among equals first come, first served, except that they share each pass
as headwater.token_shares says. Pure bookkeeping, used from the engine's thread only.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from headwater.token_shares import share_tokens

if TYPE_CHECKING:
    from headwater.services.prefill.job import PrefillJob


@dataclass(frozen=True, slots=True)
class Share:
    """How many of a prompt's pending tokens a pass computes; at least one."""

    job: PrefillJob
    num_tokens: int


class PrefillScheduler:
    """Keeps the prompts that are not done, in the order of who goes first."""

    def __init__(self, pass_tokens: int) -> None:
        self.pass_tokens = pass_tokens
        self.jobs: list[PrefillJob] = []

    @property
    def num_running(self) -> int:
        """Prompts of which something is computed."""
        return sum(job.began_at is not None for job in list(self.jobs))

    def add(self, job: PrefillJob) -> None:
        """Takes a new prompt."""
        self.jobs.append(job)
        # Sorting is stable: equals stay in the order of their arrival.
        self.jobs.sort(key=lambda job: -job.priority)

    def finish(self, job: PrefillJob) -> None:
        """Takes out a prompt that is done, or given up."""
        self.jobs.remove(job)

    def plan(self) -> list[Share]:
        """The next pass; empty when there is nothing to do.

        A pass has one model and writes to one pool: prompts for another pool than the first one's,
        as there are after a restart of decode, wait until these are done.
        """
        if not self.jobs:
            return []
        first = self.jobs[0]
        peers = [j for j in self.jobs if j.writer is first.writer and j.model is first.model]
        shares: list[Share] = []
        left = self.pass_tokens
        for _, equals in groupby(peers, key=lambda job: job.priority):
            jobs = list(equals)
            counts = share_tokens([job.num_pending for job in jobs], left)
            shares += [Share(job, count) for job, count in zip(jobs, counts, strict=True) if count]
            left -= sum(counts)
        return shares
