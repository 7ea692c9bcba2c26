"""What decode does at the moment, as far as prefill's use of the GPUs depends on it.

Lives in the event loop of the prefill process; asks a few times a second.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import grpc

from headwater.services.prefill.copy_share import Reading
from headwater.v1 import decode_service_pb2

if TYPE_CHECKING:
    from collections.abc import Callable

    from headwater.services.prefill.attachment import Attachment
    from headwater.services.prefill.copy_share import CopyShare
    from headwater.services.prefill.models import PromptModels
    from headwater.services.prefill.ways import PassWays

logger = logging.getLogger(__name__)

_INTERVAL_SECONDS = 0.2
# A process that answers at all does so in far less.
_ANSWER_SECONDS = 5.0


class DecodeWatch:
    """Tells `ways` and `models` whether decode computes answers; a silent one computes none.

    `copy_share` says what copies of weights may take of the time while it does; `is_in_pass`
    whether weights are copied for prompts now.
    """

    def __init__(
        self,
        attachment: Attachment,
        ways: PassWays,
        models: PromptModels,
        copy_share: CopyShare,
        is_in_pass: Callable[[], bool],
    ) -> None:
        self._attachment = attachment
        self._ways = ways
        self._models = models
        self._copy_share = copy_share
        self._is_in_pass = is_in_pass

    async def watch_forever(self) -> None:
        """Until cancelled. Nobody is asked while no GPU computes prompts."""
        while True:
            if self._models.num_gpus:
                await self._look()
            await asyncio.sleep(_INTERVAL_SECONDS)

    async def _look(self) -> None:
        try:
            self._note(await self._attachment.decode_status(_ANSWER_SECONDS))
        except Exception as failure:
            if not isinstance(failure, grpc.aio.AioRpcError):
                # A watch that is gone would leave things as they are for ever.
                logger.exception("decode's status was not understood")
            self._ways.leaves_one_to_decode = False
            self._models.share_copies(1.0)

    def _note(self, status: decode_service_pb2.GetDecodeStatusResponse) -> None:
        self._ways.leaves_one_to_decode = status.uses_gpu and self._models.is_shared_with_decode
        self._ways.note_decode(is_at_work=status.running_requests > 0)
        reading = Reading(
            status.running_requests,
            status.steps,
            status.busy_seconds,
            is_in_pass=self._is_in_pass(),
            is_mixed=status.pending_extend_tokens > 0,
        )
        self._copy_share.observe(reading)
        is_at_work = self._ways.is_decode_at_work
        self._models.share_copies(self._copy_share.share if is_at_work else 1.0)
