"""FP16 as the CPU's pages keep it, in C++ and in torch."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest
import torch

from headwater.kernels import supported_isas
from headwater.kv.pages import as_entries

NATIVE = Path(__file__).resolve().parents[2] / "native"


@pytest.mark.skipif("avx2" not in supported_isas(), reason="this CPU converts no FP16 itself")
def test_conversions_are_the_cpu_s_own(tmp_path: Path) -> None:
    program, seed = tmp_path / "half_check", random.randrange(1 << 31)
    source = NATIVE / "tests" / "half_check.cpp"
    flags = ["-std=c++20", "-O1", "-mf16c", f"-I{NATIVE / 'include'}"]
    subprocess.run(["c++", *flags, str(source), "-o", str(program)], check=True, timeout=300)
    print("seed", seed)
    subprocess.run([str(program), str(seed)], check=True, timeout=300)


def test_entries_beyond_the_range_become_the_greatest_and_nan_stays() -> None:
    x = torch.tensor([1e9, -torch.inf, 65519.0, 1 / 3, torch.nan])
    found = as_entries(x)
    assert found.dtype == torch.float16
    assert found[:4].tolist() == [65504, -65504, 65504, torch.tensor(1 / 3).half().item()]
    assert bool(found[4].isnan())
