"""Classes of objectives: how they are written, met, missed and enforced by the router."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from headwater.costs import PassCosts
from headwater.errors import ConfigError, InvalidRequestError, OverloadedError, QueueFullError
from headwater.generation import Timings, Usage
from headwater.objectives import Objective, parse_objectives
from headwater.services.router.objectives import Objectives
from headwater.services.router.policy import DecodeLoad, PrefillLoad, PromptPath
from headwater.services.router.requests import RouterRequest, TokenPrompt
from tests.unit.router_fakes import Rig

CLASSES = "interactive=30/0.05, batch=600/1"
SLOW = PassCosts(1.0, 1.0, 9, 100)


def test_classes_as_they_are_written() -> None:
    assert parse_objectives(" a=1/0.5,b-2=3e2/1 ") == {
        "a": Objective("a", 1.0, 0.5),
        "b-2": Objective("b-2", 300.0, 1.0),
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "form name=TTFT/TPOT"),
        ("a", "'a' must have the form"),
        ("a=1/1,", "'' must have the form"),
        ("a=1/1,a=2/2", "class a is there twice"),
        ("a=0/1", "class a: must be positive and finite, got 0"),
        ("a=1/1e999", "class a: must be positive"),
        ("a=1/e", "class a: expected a number of seconds, got 'e'"),
    ],
)
def test_classes_that_are_wrong(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_objectives(text)


def test_the_default_class_must_exist() -> None:
    with pytest.raises(ConfigError, match=r"default_class: must be one of interactive, batch"):
        Objectives(CLASSES, "other")
    objectives = Objectives(CLASSES, "batch")
    assert objectives.of("").objective.name == "batch"
    with pytest.raises(InvalidRequestError, match="objective_class: must be one of interactive"):
        objectives.of("other")


@pytest.mark.parametrize(
    ("ttft", "decode", "tokens", "counts"),
    [
        (1.0, 1.0, 101, (1, 0, 0)),
        (30.0, 5.0, 101, (1, 0, 0)),
        (30.1, 1.0, 101, (0, 1, 0)),
        (1.0, 5.1, 101, (0, 0, 1)),
        (31.0, 6.0, 101, (0, 1, 1)),
        # One token has no gap.
        (1.0, 0.0, 1, (1, 0, 0)),
    ],
)
def test_attainment(ttft: float, decode: float, tokens: int, counts: tuple[int, int, int]) -> None:
    attainment = Objectives(CLASSES, "interactive").of("")
    timings = Timings(time_to_first_token_seconds=ttft, decode_seconds=decode)
    attainment.finished(Usage(3, tokens), timings)
    assert attainment.num_finished == 1
    assert (
        attainment.num_attained,
        attainment.num_missed_ttft,
        attainment.num_missed_tpot,
    ) == counts


async def ask(rig: Rig, num_tokens: int, objective_class: str = "", n: int = 1) -> None:
    request = RouterRequest(TokenPrompt((5,) * num_tokens), objective_class=objective_class, n=n)
    async with aclosing(rig.core.generate(request)) as events:
        async for _ in events:
            pass


async def test_a_late_request_is_refused_and_a_patient_one_is_not() -> None:
    rig = Rig("yes")
    rig.outlook.told(PrefillLoad(SLOW))
    rig.prefill.gate.clear()
    # It takes 101 s of the 30 promised, but not because of load.
    first = asyncio.create_task(ask(rig, 103))
    await rig.prefill.started.wait()
    with pytest.raises(OverloadedError, match=r"later than the 30 s .* class interactive") as late:
        await ask(rig, 5)
    assert 100 <= late.value.retry_after_ms <= 30_000
    patient = asyncio.create_task(ask(rig, 5, "batch"))
    while rig.core.admission.num_running < 2:
        await asyncio.sleep(0)
    rig.prefill.gate.set()
    await asyncio.gather(first, patient)
    await rig.core.stop()
    interactive, batch = rig.core.objectives.all
    assert (interactive.num_finished, interactive.num_shed) == (1, 1)
    assert (batch.num_finished, batch.num_shed, batch.num_attained) == (1, 0, 1)
    assert rig.core.admission.num_running == 0
    assert len(rig.decode.reserved) == 2, "the late one never asked for blocks"


async def test_one_that_is_late_when_its_turn_comes_gives_its_lease_back() -> None:
    rig = Rig("yes", max_running=2)
    rig.decode.reserve_gate.clear()
    asking = asyncio.create_task(ask(rig, 8))
    while not rig.core.admission.num_waiting:
        await asyncio.sleep(0)
    # Meanwhile somebody else's prompt of 50 tokens has come to prefill.
    rig.outlook.told(PrefillLoad(SLOW))
    with rig.outlook.computing(PromptPath.PREFILL, 50):
        rig.decode.reserve_gate.set()
        with pytest.raises(OverloadedError):
            await asking
    await rig.core.stop()
    assert rig.decode.released == [1]
    assert rig.core.admission.num_running == 0
    assert rig.core.objectives.of("").num_shed == 1


async def test_nobody_is_refused_without_a_factor() -> None:
    rig = Rig("yes", shed_factor=0.0)
    rig.outlook.told(PrefillLoad(SLOW))
    with rig.outlook.computing(PromptPath.PREFILL, 50):
        await ask(rig, 8)
    await rig.core.stop()


async def test_a_full_queue_counts_as_shed() -> None:
    rig = Rig("yes", max_running=1, max_waiting=0)
    rig.prefill.gate.clear()
    first = asyncio.create_task(ask(rig, 8))
    await rig.prefill.started.wait()
    with pytest.raises(QueueFullError):
        await ask(rig, 8, "batch")
    rig.prefill.gate.set()
    await first
    await rig.core.stop()
    assert [attainment.num_shed for attainment in rig.core.objectives.all] == [0, 1]


async def test_the_faster_path_is_taken() -> None:
    rig = Rig("yes")
    rig.outlook.told(PrefillLoad(PassCosts(1.0, 0.001, 9, 2000)))
    rig.outlook.told(DecodeLoad(0.0, PassCosts(0.01, 0.01, 9, 64), batch_limit=9))
    await ask(rig, 20)
    assert rig.prefill.prompts == []
    assert rig.decode.leases[-1].prefilled_tokens == 0
    await ask(rig, 500)
    assert [len(prompt) for prompt in rig.prefill.prompts] == [500]
    assert rig.decode.leases[-1].prefilled_tokens == 500
    # Several answers need a prompt that can be forked.
    await ask(rig, 20, n=3)
    assert len(rig.prefill.prompts) == 2
    assert [lease.prefilled_tokens for lease in rig.decode.leases[-3:]] == [20] * 3
    await rig.core.stop()
    assert rig.outlook.num_chosen == {PromptPath.PREFILL: 2, PromptPath.EXTEND: 1}


@pytest.mark.parametrize("path", PromptPath)
async def test_an_answer_goes_on_where_decode_computed_it(path: PromptPath) -> None:
    """Prefill gets the prompt only: other kernels would give the answer's tokens other bits."""
    rig = Rig("an answer of several tokens", recovery_seconds=60.0, forced=path)
    rig.decode.deaths = {4}
    await ask(rig, 20)
    await rig.core.stop()
    if path is PromptPath.PREFILL:
        assert [len(prompt) for prompt in rig.prefill.prompts] == [20, 20]
    else:
        assert rig.prefill.prompts == []
    expected = 20 if path is PromptPath.PREFILL else 0
    assert [lease.prefilled_tokens for lease in rig.decode.leases] == [expected] * 2


async def test_an_answer_that_is_still_cached_is_not_computed_again() -> None:
    """After the loss of a connection, not of decode: the pool knows prompt and answer."""
    rig = Rig("an answer of several tokens", recovery_seconds=60.0, forced=PromptPath.PREFILL)
    rig.decode.deaths = {4}
    rig.decode.cached_tokens = 22
    await ask(rig, 20)
    await rig.core.stop()
    assert len(rig.prefill.prompts) == 1
    assert [lease.prefilled_tokens for lease in rig.decode.leases] == [20, 0]
