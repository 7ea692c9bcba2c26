"""VllmEngine, the protocol of the HTTP gateway SMG, on the same core as RouterService.

The gateway tokenises prompts and turns tokens into text itself, so only tokens travel here.
"""

from __future__ import annotations

import asyncio
import datetime
import math
import time
from contextlib import aclosing
from importlib.metadata import version
from typing import TYPE_CHECKING

from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from headwater.errors import CancelledError, InvalidRequestError, NotOfferedError
from headwater.generation import FinishReason, Token, Usage
from headwater.services.router.prefix_cache import PrefixCache
from headwater.services.router.requests import RouterRequest, TextPrompt, TokenPrompt
from headwater.services.router.servicer import deadline_of, objective_class_of
from headwater.services.router.tokenizer_archive import TokenizerArchive
from headwater.wire.vllm import (
    chunk_to_vllm,
    complete_to_vllm,
    in_vllm_terms,
    sampling_from_vllm,
)
from headwater.wire.vllm_kv import KvEventWriter

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from headwater.rpc.interceptor import Context
    from headwater.rpc.link import Link
    from headwater.services.router.core import RouterCore

# Leaves as many numbers as there will ever be batches.
_MAX_START_SEQUENCE_NUMBER = (1 << 63) - 1


class VllmServicer(vllm_engine_pb2_grpc.VllmEngineServicer):
    """Serves vllm.grpc.engine.VllmEngine."""

    def __init__(self, core: RouterCore, link: Link) -> None:
        self._core = core
        self._started_at = time.monotonic()
        self._last_receive_unix_seconds = time.time()
        self._stopping = asyncio.Event()
        self._prefix_cache = PrefixCache(core.decode.address, link)

    def stop(self) -> None:
        """Ends the streams that otherwise last for ever."""
        self._stopping.set()

    async def Generate(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Chunks if asked for, then the whole answer."""
        self._last_receive_unix_seconds = time.time()
        num_prompt_tokens = len(request.tokenized.input_ids)
        answers: list[list[Token]] = []
        try:
            asked = _request_from_vllm(request, objective_class_of(context))
            answers += [[] for _ in range(asked.n)]
            async with aclosing(self._core.generate(asked, deadline_of(context))) as events:
                async for event in events:
                    tokens = answers[event.index]
                    tokens.extend(event.tokens)
                    if event.tokens and request.stream:
                        usage = Usage(num_prompt_tokens, len(tokens))
                        yield chunk_to_vllm(event.tokens, usage, event.index)
                    if event.finish_reason is not None and event.usage is not None:
                        yield complete_to_vllm(
                            tokens,
                            event.usage,
                            event.finish_reason,
                            event.index,
                            matched_stop=event.matched_stop,
                            stop_token_id=event.stop_token_id,
                        )
        except InvalidRequestError as error:
            raise in_vllm_terms(error) from error
        except CancelledError:
            # By Abort; the caller still listens, and this is how the protocol tells it.
            for index, tokens in enumerate(answers):
                usage = Usage(num_prompt_tokens, len(tokens))
                yield complete_to_vllm(tokens, usage, FinishReason.CANCELLED, index)

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """Ends requests; names that are not known are passed over."""
        for request_id in request.request_ids:
            self._core.abort(request_id)
        return pb.AbortResponse()

    async def HealthCheck(
        self, request: pb.HealthCheckRequest, context: Context
    ) -> pb.HealthCheckResponse:
        """Healthy when both engines serve."""
        missing = [e for e in self._core.engines if not e.is_serving]
        message = "; ".join(f"{e.name} at {e.address} is not serving" for e in missing)
        return pb.HealthCheckResponse(healthy=not missing, message=message or "SERVING")

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        """The served model; special tokens the model does not have are -1."""
        model = self._core.model
        return pb.GetModelInfoResponse(
            model_path=model.name,
            is_generation=True,
            max_context_length=model.max_context_tokens,
            vocab_size=model.vocab_size,
            served_model_name=model.name,
            architectures=model.architectures,
            eos_token_ids=model.eos_token_ids,
            pad_token_id=-1,
            bos_token_id=-1 if model.bos_token_id is None else model.bos_token_id,
            max_req_input_len=model.max_context_tokens - 1,
        )

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        """The process."""
        return pb.GetServerInfoResponse(
            active_requests=self._core.admission.num_running + self._core.admission.num_waiting,
            last_receive_timestamp=self._last_receive_unix_seconds,
            uptime_seconds=time.monotonic() - self._started_at,
            server_type="vllm-grpc",
            data_parallel_size=1,
            max_num_seqs=self._core.admission.max_running,
        )

    async def GetLoads(self, request: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse:
        """Queue and KV pool."""
        admission = self._core.admission
        kv = await self._core.decode.kv_use()
        num_used = kv.num_blocks - kv.num_free_blocks
        load = pb.SchedulerLoad(
            num_running_reqs=admission.num_running,
            num_waiting_reqs=admission.num_waiting,
            num_total_reqs=admission.num_running + admission.num_waiting,
            num_used_tokens=num_used * kv.block_tokens,
            max_total_num_tokens=kv.num_blocks * kv.block_tokens,
            token_usage=num_used / max(1, kv.num_blocks),
            gen_throughput=self._core.generated_tokens.per_second(),
            utilization=admission.num_running / admission.max_running,
            max_running_requests=admission.max_running,
        )
        return pb.GetLoadsResponse(
            timestamp=datetime.datetime.now(datetime.UTC).isoformat(),
            version=version("headwater"),
            dp_rank_count=1,
            loads=[load],
        )

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        """The tokenizer files as a zip, in chunks."""
        archive = await asyncio.to_thread(TokenizerArchive.build, self._core.model.model_dir)
        for data, sha256 in archive.chunks():
            yield common_pb2.GetTokenizerChunk(data=data, sha256=sha256)

    async def SubscribeKvEvents(
        self, request: common_pb2.SubscribeKvEventsRequest, context: Context
    ) -> AsyncIterator[common_pb2.KvEventBatch]:
        """What decode's prefix cache holds, then each change, whatever becomes of decode."""
        if request.start_sequence_number > _MAX_START_SEQUENCE_NUMBER:
            raise InvalidRequestError(
                "start_sequence_number",
                f"must be at most {_MAX_START_SEQUENCE_NUMBER}, got "
                f"{request.start_sequence_number}: numbers after it would not fit 64 bits",
            )
        # The gateway takes a stream without headers for a worker that hangs.
        await context.send_initial_metadata(())
        writer = KvEventWriter(request.start_sequence_number)
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            async with aclosing(self._prefix_cache.follow()) as batches:
                while not stopping.done():
                    coming = asyncio.ensure_future(anext(batches))
                    try:
                        await asyncio.wait((coming, stopping), return_when=asyncio.FIRST_COMPLETED)
                        if coming.done():
                            block_tokens, batch = coming.result()
                            yield writer.write(batch, block_tokens)
                    finally:
                        # The generator can be closed only when nobody waits in it.
                        coming.cancel()
                        await asyncio.wait((coming,))
        finally:
            stopping.cancel()

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        """Not offered."""
        raise NotOfferedError("Embed: this server generates text and makes no embeddings")

    async def FlushCache(
        self, request: common_pb2.FlushCacheRequest, context: Context
    ) -> common_pb2.FlushCacheResponse:
        """Empties the prefix cache; what requests under way hold, after they end, if in time."""
        if not math.isfinite(request.timeout_s):
            raise InvalidRequestError("timeout_s", f"must be finite, got {request.timeout_s}")
        flushed, remaining = await self._prefix_cache.flush(request.timeout_s)
        message = f"{flushed} blocks flushed"
        if remaining:
            message += f"; {remaining} are held by requests under way, try again later"
        return common_pb2.FlushCacheResponse(success=not remaining, message=message)

    async def StartProfile(
        self, request: common_pb2.StartProfileRequest, context: Context
    ) -> common_pb2.ProfileResponse:
        """Not offered."""
        raise NotOfferedError("StartProfile: there is no profiler; use OpenTelemetry traces")

    async def StopProfile(
        self, request: common_pb2.StopProfileRequest, context: Context
    ) -> common_pb2.ProfileResponse:
        """Not offered."""
        raise NotOfferedError("StopProfile: there is no profiler; use OpenTelemetry traces")


def _request_from_vllm(request: pb.GenerateRequest, objective_class: str) -> RouterRequest:
    kind = request.WhichOneof("input")
    if kind is None:
        raise InvalidRequestError("input", "one of tokenized and text must be given")
    if request.HasField("mm_inputs") or request.extra_mm_inputs or request.HasField("media_refs"):
        raise InvalidRequestError("mm_inputs", "this server takes text only")
    prompt = (
        TextPrompt(request.text)
        if kind == "text"
        else TokenPrompt(tuple(request.tokenized.input_ids))
    )
    return RouterRequest(
        prompt,
        sampling_from_vllm(request.sampling_params),
        request.request_id,
        wants_text=False,
        skip_special_tokens=request.sampling_params.skip_special_tokens,
        n=request.sampling_params.n or 1,
        objective_class=objective_class,
    )
