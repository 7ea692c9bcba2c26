"""Ends what another task waits for, as if its caller had cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from headwater.errors import CancelledError

_T = TypeVar("_T")


class AbortSwitch:
    """Thrown once by anybody; felt by the task that goes through `guard`."""

    def __init__(self) -> None:
        self._is_thrown = False
        self._waiting: asyncio.Task[object] | None = None

    def throw(self) -> None:
        """Ends the guarded wait, or the next one."""
        if not self._is_thrown:
            self._is_thrown = True
            if self._waiting is not None:
                self._waiting.cancel()

    async def guard(self, step: Callable[[], Awaitable[_T]]) -> _T:
        """Awaits `step()`. Raises CancelledError when the switch is or was thrown."""
        if self._is_thrown:
            raise CancelledError("the request was aborted")
        task = self._waiting = asyncio.current_task()
        try:
            return await step()
        except asyncio.CancelledError:
            # Our own request for cancellation is taken back; another one still counts.
            if self._is_thrown and task is not None and task.uncancel() == 0:
                raise CancelledError("the request was aborted") from None
            raise
        finally:
            self._waiting = None
