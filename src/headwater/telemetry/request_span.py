"""What the span of a request says: gen_ai.* attributes, and an event for each stage it reaches.

The conventions are OpenTelemetry's for generative AI; gen_ai.latency.* are vLLM's. Prompts and
answers are only there when the setting telemetry.record_content is on.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from opentelemetry import trace

from headwater.telemetry.metrics import PROVIDER_NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from opentelemetry.util.types import AttributeValue

    from headwater.generation import FinishReason, SamplingParams, Timings, Usage


class RequestSpan:
    """The span that is current where this is made, as one request's; cheap when not recorded."""

    def __init__(self, *, records_content: bool = False) -> None:
        self._span = trace.get_current_span()
        self._is_recording = self._span.is_recording()
        self.records_content = records_content and self._is_recording
        self._reasons: dict[int, str] = {}
        self._answers: dict[int, list[int]] = {}
        self._num_output_tokens = 0

    def asked(
        self, request_id: str, operation: str, model_name: str, sampling: SamplingParams, n: int
    ) -> None:
        """What the request is."""
        if not self._is_recording:
            return
        attributes: dict[str, AttributeValue | None] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": PROVIDER_NAME,
            "gen_ai.request.model": model_name,
            "gen_ai.response.model": model_name,
            "gen_ai.response.id": request_id,
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k or None,
            "gen_ai.request.seed": _as_int64(sampling.seed),
            "gen_ai.request.choice.count": n if n > 1 else None,
        }
        self._span.set_attributes({k: v for k, v in attributes.items() if v is not None})

    def prompt(self, turns: Sequence[tuple[str, str]]) -> None:
        """The prompt itself, as (role, content) pairs; for `records_content` only."""
        messages = [
            {"role": role, "parts": [{"type": "text", "content": content}]}
            for role, content in turns
        ]
        self._span.set_attribute("gen_ai.input.messages", json.dumps(messages))

    def event(self, name: str, **attributes: AttributeValue) -> None:
        """The request reached a stage; attributes become headwater.<name>."""
        if self._is_recording:
            self._span.add_event(name, {f"headwater.{k}": v for k, v in attributes.items()})

    def answered(self, index: int, reason: FinishReason, usage: Usage, timings: Timings) -> None:
        """The answer `index` ended well."""
        if not self._is_recording:
            return
        self._reasons[index] = reason.value
        self._num_output_tokens += usage.completion_tokens
        self._span.add_event("finished", {"headwater.finish_reason": reason.value})
        self._span.set_attributes(
            {
                "gen_ai.response.finish_reasons": [self._reasons[i] for i in sorted(self._reasons)],
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": self._num_output_tokens,
                "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
                "gen_ai.latency.time_in_queue": timings.queue_seconds,
                "gen_ai.latency.time_in_model_prefill": timings.prefill_seconds,
                "gen_ai.latency.time_in_model_decode": timings.decode_seconds,
                "gen_ai.latency.time_to_first_token": timings.time_to_first_token_seconds,
                "gen_ai.latency.e2e": timings.total_seconds,
            }
        )

    def tokens(self, index: int, token_ids: Sequence[int]) -> None:
        """More of an answer; for `records_content` only."""
        self._answers.setdefault(index, []).extend(token_ids)

    def close(self, text_of: Callable[[Sequence[int]], str]) -> None:
        """The request is over; writes down the answers, if any were to be recorded."""
        if self._answers:
            messages = [
                {
                    "role": "assistant",
                    "parts": [{"type": "text", "content": text_of(token_ids)}],
                    "finish_reason": self._reasons.get(index, "error"),
                }
                for index, token_ids in sorted(self._answers.items())
            ]
            self._span.set_attribute("gen_ai.output.messages", json.dumps(messages))


def _as_int64(number: int | None) -> int | None:
    """The same, or None where OTLP's integers, of 64 bits with a sign, cannot hold it."""
    return number if number is not None and number < 2**63 else None
