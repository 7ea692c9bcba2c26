"""What an engine that uses no GPU must not load."""

from __future__ import annotations

import subprocess
import sys


def test_engines_on_cpus_load_nothing_for_gpus() -> None:
    program = (
        "import sys, headwater.services.decode.service, headwater.services.prefill.service\n"
        "heavy = [m for m in sys.modules if m == 'triton' or m.startswith('headwater.gpu.')]\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
