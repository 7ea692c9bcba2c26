"""What decode does at the moment, as far as prefill's use of the GPUs depends on it.

Lives in the event loop of the prefill process; asks a few times a second.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc

from headwater.services.prefill.copy_share import Reading
from headwater.v1 import decode_service_pb2

if TYPE_CHECKING:
    from headwater.services.prefill.attachment import Attachment
    from headwater.services.prefill.copy_share import CopyShare
    from headwater.services.prefill.models import PromptModels
    from headwater.services.prefill.ways import PassWays

_INTERVAL_SECONDS = 0.2


class DecodeWatch:
    """Tells `ways` and `models` whether decode computes answers; a silent one computes none.

    `copy_share` says what copies of weights may take of the time while it does.
    """

    def __init__(
        self, attachment: Attachment, ways: PassWays, models: PromptModels, copy_share: CopyShare
    ) -> None:
        self._attachment = attachment
        self._ways = ways
        self._models = models
        self._copy_share = copy_share

    async def watch_forever(self) -> None:
        """Until cancelled."""
        while True:
            try:
                status = await self._attachment.decode_status()
                self._note(status)
            except grpc.aio.AioRpcError:
                self._ways.leaves_one_to_decode = False
                self._models.share_copies(1.0)
            await asyncio.sleep(_INTERVAL_SECONDS)

    def _note(self, status: decode_service_pb2.GetDecodeStatusResponse) -> None:
        self._ways.leaves_one_to_decode = status.uses_gpu and self._models.is_shared_with_decode
        self._ways.note_decode(is_at_work=status.running_requests > 0)
        reading = Reading(
            status.running_requests,
            status.steps,
            status.busy_seconds,
            self._models.streamed_bytes,
            is_mixed=status.pending_extend_tokens > 0,
        )
        self._copy_share.observe(reading)
        is_at_work = self._ways.is_decode_at_work
        self._models.share_copies(self._copy_share.share if is_at_work else 1.0)
