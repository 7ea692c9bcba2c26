"""What `headwater bench dslp` says where its GPUs are not there."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import pytest

from headwater.bench.gpu.dslp import bench_dslp
from headwater.errors import ConfigError


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=b"1\n"))
    rows = bench_dslp("tiny", [8], [8], ranks=2, distinct=1, vram_gib=1.0, quantize_from=1)
    with pytest.raises(ConfigError, match="--ranks: 2 CUDA devices are needed, .* sees 1; name"):
        next(rows)
