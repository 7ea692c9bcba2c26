"""What the router process must not load."""

from __future__ import annotations

import subprocess
import sys


def test_router_starts_without_torch() -> None:
    program = (
        "import sys, headwater.services.router.router, headwater.convert.default_model\n"
        "heavy = {'torch', 'safetensors', 'transformers', 'gguf'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_core_knows_neither_grpc_nor_protobuf() -> None:
    program = (
        "import sys, headwater.services.router.core\n"
        "assert 'headwater.v1' not in sys.modules\n"
        "assert 'grpc' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
