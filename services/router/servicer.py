"""RouterService: translates between headwater.v1 and the core, and nothing else."""

from __future__ import annotations

import os
import time
from contextlib import aclosing
from typing import TYPE_CHECKING

from headwater.errors import InvalidRequestError
from headwater.services.router.policy import PromptPath
from headwater.services.router.requests import (
    ChatPrompt,
    Prompt,
    RouterRequest,
    TextPrompt,
    TokenPrompt,
    new_request_id,
)
from headwater.v1 import router_service_pb2 as pb
from headwater.v1 import router_service_pb2_grpc
from headwater.wire.generation import (
    finish_reason_to_pb,
    sampling_from_pb,
    timings_to_pb,
    token_to_pb,
    usage_to_pb,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from headwater.generation import TextEvent
    from headwater.rpc.interceptor import Context
    from headwater.services.router.core import RouterCore
    from headwater.services.router.objectives import Attainment
    from headwater.services.router.recent import RecentAnswers

# Metadata by which any call, of either service, names its class of objectives.
OBJECTIVE_CLASS_KEY = "headwater-objective-class"
# gRPC reports a call without a deadline as one in the very far future.
_NO_DEADLINE_SECONDS = 10 * 365 * 24 * 3600.0


class RouterServicer(router_service_pb2_grpc.RouterServiceServicer):
    """Serves RouterService."""

    def __init__(self, core: RouterCore) -> None:
        self._core = core
        self._started_at = time.monotonic()

    async def Generate(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Streams the answer."""
        asked = _request_from_pb(request, objective_class_of(context))
        async with aclosing(self._core.generate(asked, deadline_of(context))) as events:
            async for event in events:
                yield _event_to_pb(asked.request_id, event)

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        """The served model."""
        model = self._core.model
        return pb.GetModelResponse(
            model_name=model.name,
            max_context_tokens=model.max_context_tokens,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            has_chat_template=model.chat_template is not None,
        )

    async def GetStatus(
        self, request: pb.GetRouterStatusRequest, context: Context
    ) -> pb.GetRouterStatusResponse:
        """What the process does now."""
        core = self._core
        return pb.GetRouterStatusResponse(
            pid=os.getpid(),
            uptime_seconds=time.monotonic() - self._started_at,
            model_name=core.model.name,
            running_requests=core.admission.num_running,
            waiting_requests=core.admission.num_waiting,
            finished_requests=core.num_finished,
            generated_tokens=core.generated_tokens.total,
            tokens_per_second=core.generated_tokens.per_second(),
            engines=[
                pb.EngineState(
                    name=engine.name, address=engine.address, is_serving=engine.is_serving
                )
                for engine in core.engines
            ],
            objectives=[_attainment_to_pb(attainment) for attainment in core.objectives.all],
            prefilled_requests=core.outlook.num_chosen[PromptPath.PREFILL],
            extended_requests=core.outlook.num_chosen[PromptPath.EXTEND],
            predicted_ttft_seconds=core.predicted_ttft_seconds(1),
            recent=_recent_to_pb(core.recent),
        )


def deadline_of(context: Context) -> float | None:
    """The call's deadline as a time.monotonic() value; None when it has none."""
    left = context.time_remaining()
    if left is None or left > _NO_DEADLINE_SECONDS:
        return None
    return time.monotonic() + float(left)


def objective_class_of(context: Context) -> str:
    """The class of objectives that the call's metadata names; empty when they name none."""
    for key, value in context.invocation_metadata() or ():
        if key == OBJECTIVE_CLASS_KEY and isinstance(value, str):
            return value
    return ""


def _recent_to_pb(recent: RecentAnswers) -> pb.RecentLatencies | None:
    if not len(recent):
        return None
    ttft, tpot, queue = recent.ttft, recent.tpot, recent.queue
    return pb.RecentLatencies(
        answers=len(recent),
        ttft_p50_seconds=ttft.p50,
        ttft_p95_seconds=ttft.p95,
        tpot_p50_seconds=tpot.p50,
        tpot_p95_seconds=tpot.p95,
        queue_p50_seconds=queue.p50,
        queue_p95_seconds=queue.p95,
    )


def _attainment_to_pb(attainment: Attainment) -> pb.ObjectiveAttainment:
    return pb.ObjectiveAttainment(
        name=attainment.objective.name,
        ttft_objective_seconds=attainment.objective.ttft_seconds,
        tpot_objective_seconds=attainment.objective.tpot_seconds,
        finished_requests=attainment.num_finished,
        attained_requests=attainment.num_attained,
        missed_ttft_requests=attainment.num_missed_ttft,
        missed_tpot_requests=attainment.num_missed_tpot,
        shed_requests=attainment.num_shed,
    )


def _request_from_pb(request: pb.GenerateRequest, objective_class: str) -> RouterRequest:
    return RouterRequest(
        _prompt_from_pb(request),
        sampling_from_pb(request.sampling),
        request.request_id or new_request_id(),
        n=request.n or 1,
        priority=request.priority,
        objective_class=request.objective_class or objective_class,
    )


def _prompt_from_pb(request: pb.GenerateRequest) -> Prompt:
    kind = request.WhichOneof("prompt")
    if kind == "text":
        return TextPrompt(request.text)
    if kind == "chat":
        return ChatPrompt(
            tuple((message.role, message.content) for message in request.chat.messages)
        )
    if kind == "token_ids":
        return TokenPrompt(tuple(request.token_ids.ids))
    raise InvalidRequestError("prompt", "one of text, chat and token_ids must be given")


def _event_to_pb(request_id: str, event: TextEvent) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        request_id=request_id,
        text=event.text,
        tokens=[token_to_pb(token) for token in event.tokens],
        finish_reason=finish_reason_to_pb(event.finish_reason),
        usage=None if event.usage is None else usage_to_pb(event.usage),
        timings=None if event.timings is None else timings_to_pb(event.timings),
        prefill_progress=event.prefill_progress,
        index=event.index,
    )
