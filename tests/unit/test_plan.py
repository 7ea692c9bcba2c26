"""`headwater plan`: sizes, formulas, machine files, and how far it is from what was measured."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from headwater.cli.main import main
from headwater.cli.plan import spec_of
from headwater.errors import ConfigError
from headwater.plan.footprint import Footprint, footprint_of
from headwater.plan.machine import Gpu, Machine, read_machine
from headwater.plan.predict import prompt_time, quantize_from, step_time, two_streams_per_second
from headwater.synth.shapes import make_config

ROOT = Path(__file__).resolve().parents[2]
MACHINES = sorted((ROOT / "examples" / "machines").glob("*.toml"))
GPU = Gpu("a GPU", 32, 50, 1000, 200, 400)
MACHINE = Machine("a machine", 64, 1024, (200, 200), 5.0, (GPU, GPU))


@pytest.fixture(scope="module")
def deepseek() -> Footprint:
    return footprint_of(spec_of("deepseek-v3", None))


@pytest.mark.parametrize(
    ("shape", "fmt", "gigabytes", "active_billions"),
    [
        ("deepseek-v3", None, 673, 36.6),
        ("kimi-k2", None, 1030, 31.4),
        ("qwen3-235b", None, 470, 21.0),
        ("qwen3-30b", "int4", 18.0, 2.7),
        ("mixtral-8x7b", "fp8", 47.5, 12.6),
    ],
)
def test_footprints(shape: str, fmt: str | None, gigabytes: float, active_billions: float) -> None:
    """Bytes of the weights, and parameters that a token meets in the layers."""
    found = footprint_of(spec_of(shape, fmt))
    assert found.weight_bytes / 1e9 == pytest.approx(gigabytes, rel=0.03)
    assert found.token_flops / 2e9 == pytest.approx(active_billions, rel=0.03)
    assert found.expert_bytes < found.streamed_bytes < found.weight_bytes
    bits = {"int4": 4.25, "fp8": 8, None: 16 if shape == "qwen3-235b" else 8}[fmt]
    assert 8 * found.expert_bytes / found.expert_elements == pytest.approx(bits, rel=0.03)
    assert found.serial_bytes <= found.dense_bytes


def test_chosen_experts(deepseek: Footprint) -> None:
    one = deepseek.chosen_bytes(1)
    assert one == pytest.approx(deepseek.expert_bytes * 8 / 256)
    assert one < deepseek.chosen_bytes(2) < 2 * one
    assert deepseek.chosen_bytes(10_000) == pytest.approx(deepseek.expert_bytes)


def test_prompts(deepseek: Footprint) -> None:
    """Bound by the link when short, by products when long; two GPUs share both."""
    short = prompt_time(deepseek, MACHINE, 2048)
    assert short.transfer_seconds == pytest.approx(deepseek.streamed_bytes / 50e9)
    assert short.seconds == pytest.approx(short.transfer_seconds + 0.065 * short.compute_seconds)
    long = prompt_time(deepseek, MACHINE, 65536)
    assert long.seconds > long.compute_seconds > long.transfer_seconds
    # 64 rows per expert are multiplied as they lie, more are expanded before, 2 TB at 690 GB/s.
    more = prompt_time(deepseek, MACHINE, 2049)
    assert more.compute_seconds - short.compute_seconds == pytest.approx(2.85, rel=0.02)
    assert prompt_time(deepseek, MACHINE, 2048, num_gpus=2).seconds < 0.65 * short.seconds
    cut = prompt_time(deepseek, MACHINE, 65536, sweep_tokens=16384)
    assert cut.transfer_seconds == pytest.approx(4 * long.transfer_seconds)
    on_cpu = prompt_time(deepseek, MACHINE, 2048, num_gpus=0)
    assert on_cpu.seconds == on_cpu.compute_seconds > short.seconds
    faster = dataclasses.replace(MACHINE, cpu_tflop_per_s=1e6)
    assert prompt_time(deepseek, faster, 2048, num_gpus=0).seconds == pytest.approx(
        deepseek.streamed_bytes / 400e9
    )


def test_steps(deepseek: Footprint) -> None:
    one = step_time(deepseek, MACHINE, 1, 2048)
    assert one.cpu_seconds == pytest.approx(deepseek.chosen_bytes(1) / 400e9 / 0.99)
    assert one.seconds == pytest.approx(one.cpu_seconds + one.gpu_seconds)
    assert step_time(deepseek, MACHINE, 1, 65536).gpu_seconds > one.gpu_seconds
    on_cpu = step_time(deepseek, MACHINE, 1, 0, num_gpus=0)
    bytes_read = deepseek.chosen_bytes(1) + deepseek.dense_bytes
    assert on_cpu.seconds == pytest.approx(bytes_read / 400e9 / 0.89)
    merged = step_time(deepseek, MACHINE, 2, 2048)
    assert two_streams_per_second(deepseek, MACHINE, 2048) >= 2 / merged.seconds
    # CPU's part twice is less than one merged step with the GPU's part after it.
    rate = two_streams_per_second(deepseek, MACHINE, 2048)
    assert rate <= 1 / max(one.cpu_seconds, one.gpu_seconds)


def test_activations_are_rounded_when_fp16_would_hold_up_the_link(deepseek: Footprint) -> None:
    (gpu, *_) = MACHINE.gpus
    fast = dataclasses.replace(gpu, fp8_tflop_per_s=8 * gpu.bf16_tflop_per_s)
    machine = dataclasses.replace(MACHINE, gpus=(fast,))
    at = quantize_from(deepseek, machine)
    before, after = (
        prompt_time(deepseek, machine, tokens, sweep_tokens=1 << 20) for tokens in (at - 1, at)
    )
    longer = prompt_time(deepseek, machine, 2 * at, sweep_tokens=1 << 20)
    quantized = prompt_time(deepseek, machine, 2 * at, sweep_tokens=1 << 20, quantize_from=at)
    assert quantized.seconds < longer.seconds
    slow = dataclasses.replace(gpu, fp8_tflop_per_s=gpu.bf16_tflop_per_s)
    assert quantize_from(deepseek, dataclasses.replace(MACHINE, gpus=(slow,))) == 0
    assert before.compute_seconds <= before.transfer_seconds
    assert after.compute_seconds > after.transfer_seconds


def test_errors_against_every_measurement() -> None:
    """As `python benchmarks/plan.py` prints them."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "plan.py")],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    *rows, last = done.stdout.splitlines()
    assert len(rows) > 20
    median = float(last.split()[2].rstrip("%,"))
    largest = float(last.split()[4].rstrip("%"))
    assert median < 5.0, done.stdout
    assert largest < 30.0, done.stdout


@pytest.mark.parametrize("path", MACHINES, ids=lambda path: path.stem)
def test_every_example_machine_has_a_plan(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(make_config("qwen3-235b")))
    for model in (str(folder), str(folder / "config.json")):
        assert main(["plan", "--model", model, "--machine", str(path), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        gpus = len(read_machine(path).gpus)
        assert [way["gpus"] for way in found["ways"]] == list(range(gpus + 1))
        assert len(found["memory"]) == gpus + 1
        for way in found["ways"]:
            seconds = [row["seconds"] for row in way["prompts"]]
            assert seconds == sorted(seconds)
    assert main(["plan", "--model", "deepseek-v3", "--machine", str(path)]) == 0
    assert "two streams at once" in capsys.readouterr().out


def test_what_does_not_fit_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    path = next(path for path in MACHINES if path.stem == "zen4-2-cores")
    assert main(["plan", "--model", "deepseek-v3", "--machine", str(path)]) == 0
    assert "GiB of memory are missing" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("cores = [", "cannot be read as TOML"),
        ("cores = 4", "name: is missing"),
        ('name = "x"\ncores = -1', "cores: must be a number above 0, got -1"),
        ('nam = "x"', "nam: is not known"),
        (
            'name = "x"\ncores = 1\ndram_gib = 1\ndram_gb_per_s = []\ncpu_tflop_per_s = 1',
            "dram_gb_per_s: must be numbers above 0",
        ),
        (
            'name = "x"\ncores = 1\ndram_gib = 1\ndram_gb_per_s = [1]\ncpu_tflop_per_s = 1\n'
            '[[gpus]]\nname = "g"',
            r"gpus\[0\]: vram_gib: is missing",
        ),
    ],
)
def test_wrong_machine_files(text: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        read_machine(path)


def test_wrong_models(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    machine = str(MACHINES[0])
    assert main(["plan", "--model", "gpt-9", "--machine", machine]) == 1
    assert "--model: 'gpt-9' is no folder" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps(make_config("qwen3-30b")))
    arguments = ["plan", "--model", str(tmp_path), "--machine", machine, "--format", "fp8"]
    assert main(arguments) == 1
    assert "--format: is for named shapes" in capsys.readouterr().err
