"""Several ranks as processes of their own, driven as the prefill service drives them."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from headwater.config import TelemetryConfig
from headwater.errors import (
    CancelledError,
    ConfigError,
    ResourceError,
    SegmentError,
    UnavailableError,
)
from headwater.gpu import team as team_module
from headwater.gpu.layout import lay_out
from headwater.gpu.memory_plan import MemoryPlan
from headwater.gpu.prefill_model import StreamedModel
from headwater.gpu.streams import HostQueues
from headwater.gpu.team import RankSettings, Team
from headwater.gpu.team_model import TeamModel
from headwater.kv.writer import KvWriter
from headwater.model.spec import ModelSpec
from headwater.services.prefill.job import PrefillDone
from tests.gpu.samples import relative_error
from tests.unit.test_prefill_engine import PROMPTS, GatedModel, Rig

if TYPE_CHECKING:
    from tests.unit.test_prefill_engine import Request

# Sums come in another order, and BF16 rounds them.
TOLERANCE = 2e-2


def _model(rig: Rig, spec: ModelSpec, devices: tuple[str, ...]) -> TeamModel:
    settings = RankSettings(
        devices=devices,
        weights=rig.store.handle,
        vram_gib=0.0,
        sweep_tokens=256,
        quantize_from=0,
        threads=1,
        telemetry=TelemetryConfig(),
    )
    ways = rig.engine.ways
    return TeamModel(spec, settings, lambda: ways.current, ways.limit)


@contextmanager
def _team(rig: Rig, spec: ModelSpec, devices: tuple[str, ...]) -> Iterator[TeamModel]:
    team = _model(rig, spec, devices)
    try:
        team.start()
        team.use_pool(rig.writer)
        rig.engine.ways.offer(team.max_tokens)
        yield team
    finally:
        team.close()


@pytest.fixture
def rig(tiny_model: Path, shm_prefix: str) -> Iterator[Rig]:
    rig = Rig(tiny_model, shm_prefix)
    yield rig
    rig.close()


def _ask(rig: Rig, prompt: list[int]) -> list[torch.Tensor]:
    request = rig.ask(prompt)
    assert isinstance(request.end(), PrefillDone)
    bits = rig.bits(request)
    rig.pool.release(1, [request.lease.lease_id])
    return bits


def _assert_close(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert relative_error(a.float(), b.float()) < TOLERANCE


def _expected(rig: Rig, spec: ModelSpec) -> list[list[torch.Tensor]]:
    """What one rank in this process leaves of each prompt."""
    layout = lay_out(spec, rig.store, group_bytes=1 << 15)
    plan = MemoryPlan(2, 2, 256, 0, 0)
    model = StreamedModel(spec, rig.store, layout, plan, HostQueues())
    rig.model = GatedModel(model)  # type: ignore[arg-type]
    return [_ask(rig, prompt) for prompt in PROMPTS]


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_ranks_compute_what_one_does_and_a_lost_one_costs_its_prompts_alone(
    rig: Rig, tiny_model: Path
) -> None:
    """Both ways; packed; a prompt that leaves; a rank killed in a sweep, and one between two."""
    spec = ModelSpec.load(tiny_model)
    rig.engine.start()
    expected = _expected(rig, spec)
    before = _descriptors()
    with _team(rig, spec, ("cpu", "cpu")) as team:
        pids = team.rank_pids
        rig.model = GatedModel(team)  # type: ignore[arg-type]
        for way in (2, 1, 2):
            rig.engine.ways.offer({1: 256, 2: 256})
            for other in (1, 2):
                rig.engine.ways.observe_made_up(other, 10, 1.0 if other == way else 10.0)
            rig.model.hold()
            requests = [rig.ask(prompt) for prompt in PROMPTS]
            rig.model.allow()
            for request, bits in zip(requests, expected, strict=True):
                assert isinstance(request.end(), PrefillDone)
                _assert_close(rig.bits(request), bits)
            rig.pool.release(1, [request.lease.lease_id for request in requests])
            assert rig.engine.ways.current == way
        assert team.copied_bytes > 0

        _leave_between_layers(rig, expected[1])
        _kill_within_a_sweep(rig, pids[1])
        # The others are gone, too, before anybody was told.
        assert not any(map(_is_alive, pids))
        _assert_close(_ask(rig, PROMPTS[0]), expected[0])
        assert team.num_lost == 1
        assert set(team.rank_pids).isdisjoint(pids)

        # Others may find less memory than those before had.
        team.max_tokens = {1: 300, 2: 300}
        rig.engine.ways.limit(team.max_tokens)
        assert rig.engine.ways.pass_tokens == 300
        pids = team.rank_pids
        os.kill(pids[0], signal.SIGKILL)
        # Until it is dead, and still ours to be waited for.
        os.waitid(os.P_PID, pids[0], os.WEXITED | os.WNOWAIT)
        _assert_close(_ask(rig, PROMPTS[2]), expected[2])
        assert team.num_lost == 2
        assert rig.engine.ways.pass_tokens == 256
        pids = team.rank_pids
    assert not any(map(_is_alive, pids))
    assert _descriptors() == before


def _leave_between_layers(rig: Rig, expected: list[torch.Tensor]) -> None:
    rig.model.hold()
    first = rig.ask(PROMPTS[3])
    rig.model.wait_for(0, 1)
    leaving, staying = rig.ask(PROMPTS[0]), rig.ask(PROMPTS[1])
    rig.model.allow(rig.layout.num_layers)
    assert isinstance(first.end(), PrefillDone)
    rig.model.wait_for(0, 2)
    leaving.job.cancelled.set()
    rig.model.allow()
    assert isinstance(leaving.end(), CancelledError)
    assert isinstance(staying.end(), PrefillDone)
    _assert_close(rig.bits(staying), expected)


def _kill_within_a_sweep(rig: Rig, pid: int) -> Request:
    rig.model.hold()
    request = rig.ask(PROMPTS[0])
    rig.model.wait_for(0, 1)
    rig.model.allow(1)
    rig.model.wait_for(1, 1)
    os.kill(pid, signal.SIGKILL)
    rig.model.allow()
    error = request.end()
    assert isinstance(error, UnavailableError)
    assert f"(pid {pid}) died; its prompts are given up" in str(error)
    return request


def test_a_rank_that_cannot_start_says_why(rig: Rig, tiny_model: Path) -> None:
    spec = ModelSpec.load(tiny_model)
    before = _descriptors()
    rig.engine.start()
    with (
        pytest.raises(ConfigError, match="this process sees no CUDA device"),
        _team(rig, spec, ("cuda:0", "cuda:1")),
    ):
        raise AssertionError("there is no such team")
    assert _descriptors() == before


def test_the_first_goes_on_by_itself_where_another_is_broken(
    rig: Rig, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ModelSpec.load(tiny_model)
    rig.engine.start()
    expected = _expected(rig, spec)
    wait_until_ready = Team.wait_until_ready

    def refuse_two(team: Team) -> None:
        if len(team.ranks) > 1:
            team.end()
            raise ResourceError("cuda:1 has fallen off the bus")
        wait_until_ready(team)

    with _team(rig, spec, ("cpu", "cpu")) as team:
        ways = rig.engine.ways
        rig.model = GatedModel(team)  # type: ignore[arg-type]
        for num_ranks in (1, 2):
            if num_ranks == 1:
                monkeypatch.setattr(Team, "wait_until_ready", refuse_two)
            else:
                monkeypatch.undo()
            _kill_within_a_sweep(rig, team.rank_pids[0])
            # Packed, and one of them leaves.
            _leave_between_layers(rig, expected[1])
            assert len(team.rank_pids) == num_ranks
            assert list(ways.all_costs) == [1, 2][:num_ranks]
        assert team.num_lost == 2


def test_a_prompt_of_a_pool_that_was_replaced_is_refused(rig: Rig, tiny_model: Path) -> None:
    spec = ModelSpec.load(tiny_model)
    rig.engine.start()
    with _team(rig, spec, ("cpu", "cpu")) as team:
        rig.model = GatedModel(team)  # type: ignore[arg-type]
        newer = KvWriter(rig.segment.handle, rig.layout)
        team.use_pool(newer)
        error = rig.ask(PROMPTS[0]).end()
        assert isinstance(error, SegmentError)
        assert "the KV pool of the prompt has been replaced" in str(error)
        assert team.num_lost == 0
        _assert_that_a_rank_that_hangs_is_noticed(team)
        team.use_pool(rig.writer)
        # Other weights come, or the service ends, in the middle of a layer.
        os.kill(team.rank_pids[0], signal.SIGSTOP)
        request = rig.ask(PROMPTS[0])
        rig.model.wait_for(0, 1)
        team.close()
        error = request.end()
        assert isinstance(error, UnavailableError)
        assert "stopping, or takes other weights" in str(error)
        assert team.num_lost == 0
        newer.close()


def _assert_that_a_rank_that_hangs_is_noticed(team: TeamModel) -> None:
    ranks = team._team
    assert ranks is not None
    last = ranks.ranks[-1]
    assert last.socket.gettimeout() == team_module.MESSAGE_SECONDS
    last.socket.settimeout(0.1)
    os.kill(last.pid, signal.SIGSTOP)
    with pytest.raises(UnavailableError, match="said nothing for 1 s"):
        ranks.tell([last], {"what": "sweep"}, bytes(1 << 24))


def test_ranks_that_start_can_be_stopped(
    rig: Rig, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.engine.start()
    before = _descriptors()
    pids: list[int] = []

    def wait_until_ready(self: Team) -> None:
        pids.extend(rank.pid for rank in self.ranks)
        monkeypatch.undo()
        team.stop()
        self.wait_until_ready()

    monkeypatch.setattr(Team, "wait_until_ready", wait_until_ready)
    team = _model(rig, ModelSpec.load(tiny_model), ("cpu", "cpu"))
    for _ in range(2):
        with pytest.raises(UnavailableError, match="stopping, or takes other weights"):
            team.start()
    team.close()
    assert len(pids) == 2
    assert not any(map(_is_alive, pids))
    assert _descriptors() == before


def test_a_rank_for_which_there_is_no_process_takes_the_others_with_it(
    rig: Rig, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.engine.start()
    before = _descriptors()
    begun: list[subprocess.Popen[bytes]] = []

    def begin(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        if begun:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        begun.append(popen(*arguments, **options))
        return begun[0]

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", begin)
    team = _model(rig, ModelSpec.load(tiny_model), ("cpu", "cpu"))
    with pytest.raises(ResourceError, match="a rank of prefill cannot be started: .*unavailable"):
        team.start()
    assert begun[0].returncode == -signal.SIGKILL
    assert _descriptors() == before
