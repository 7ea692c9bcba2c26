"""The prefill engine over the streamed model: packing, a prompt that leaves, work after that."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from headwater.errors import CancelledError
from headwater.gpu.layout import lay_out
from headwater.gpu.memory_plan import MemoryPlan
from headwater.gpu.prefill_model import StreamedModel
from headwater.gpu.streams import HostQueues
from headwater.model.spec import ModelSpec
from headwater.services.prefill.job import PrefillDone
from tests.gpu.samples import relative_error
from tests.unit.test_prefill_engine import PROMPTS, GatedModel, Request, Rig

# A prompt that is packed with others meets them in products whose sums come in another order.
TOLERANCE = 2e-2


@pytest.fixture
def rig(tiny_model: Path, shm_prefix: str) -> Iterator[Rig]:
    rig = Rig(tiny_model, shm_prefix)
    spec = ModelSpec.load(tiny_model)
    layout = lay_out(spec, rig.store, group_bytes=1 << 15)
    model = StreamedModel(spec, rig.store, layout, MemoryPlan(2, 2, 64, 0, 0), HostQueues())
    rig.model = GatedModel(model)  # type: ignore[arg-type]
    rig.engine.ways.offer({1: 64})
    yield rig
    rig.close()


def _alone(rig: Rig, prompt: list[int]) -> list[torch.Tensor]:
    request = rig.ask(prompt)
    assert isinstance(request.end(), PrefillDone)
    bits = rig.bits(request)
    rig.pool.release(1, [request.lease.lease_id])
    return bits


def _assert_close(rig: Rig, request: Request, expected: list[torch.Tensor]) -> None:
    for ours, theirs in zip(rig.bits(request), expected, strict=True):
        assert relative_error(ours.float(), theirs.float()) < TOLERANCE


def test_packed_prompts_and_prompts_in_pieces(rig: Rig) -> None:
    rig.engine.start()
    alone = [_alone(rig, prompt) for prompt in PROMPTS]
    rig.model.hold()
    requests = [rig.ask(prompt) for prompt in PROMPTS]
    rig.model.allow()
    for request, expected in zip(requests, alone, strict=True):
        assert isinstance(request.end(), PrefillDone)
        _assert_close(rig, request, expected)


def test_a_prompt_that_leaves_between_layers_harms_nobody(rig: Rig) -> None:
    rig.engine.start()
    expected = _alone(rig, PROMPTS[1])
    rig.model.hold()
    leaving, staying = rig.ask(PROMPTS[0]), rig.ask(PROMPTS[1])
    rig.model.wait_for(0, 2)
    leaving.job.cancelled.set()
    rig.model.allow()
    assert isinstance(leaving.end(), CancelledError)
    assert isinstance(staying.end(), PrefillDone)
    _assert_close(rig, staying, expected)
    after = rig.ask(PROMPTS[1])
    assert isinstance(after.end(), PrefillDone)
    _assert_close(rig, after, expected)
