"""How fast is a GPU that holds a twentieth of the model: prefill by streaming, decode with the CPU?

`python benchmarks/gpu.py slp [--vram GIB] [--tokens N ...] [--json FILE]`. Weights are random and a
few layers of them are repeated. Results are written after each row: an end by force keeps them.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from record import write_result

if TYPE_CHECKING:
    from collections.abc import Iterable


def show_all(rows: Iterable[dict[str, Any]], path: str | None) -> None:
    """One line per row, as it comes, and all rows so far into `path`."""
    found: list[dict[str, Any]] = []
    for row in rows:
        found.append(row)
        cells = (f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
        print(", ".join(cells), flush=True)
        write_result(path, found)


def slp(arguments: argparse.Namespace) -> None:
    """Stream-loading prefill."""
    from headwater.bench.gpu.slp import bench_slp

    rows = bench_slp(
        arguments.shape,
        sorted(arguments.tokens),
        distinct=arguments.distinct,
        vram_gib=arguments.vram,
        quantize_from=arguments.quantize_from,
        experts=arguments.experts,
    )
    show_all(rows, arguments.json)


def dslp(arguments: argparse.Namespace) -> None:
    """Stream-loading prefill over several GPUs, against one of them."""
    from headwater.bench.gpu.dslp import bench_dslp

    rows = bench_dslp(
        arguments.shape,
        sorted(arguments.tokens),
        sorted(arguments.together),
        ranks=arguments.ranks,
        distinct=arguments.distinct,
        vram_gib=arguments.vram,
        quantize_from=arguments.quantize_from,
    )
    show_all(rows, arguments.json)


def products(arguments: argparse.Namespace) -> None:
    """The grouped products, for a choice of tiles."""
    import torch

    from headwater.bench.gpu.kernels import bench_products
    from headwater.gpu.kernels.table import TileConfig

    configs = [
        (height, TileConfig(width, warps, stages))
        for height, width, warps, stages in (map(int, tile.split("x")) for tile in arguments.tiles)
    ]
    show_all(bench_products(arguments.rows, configs, torch.device("cuda")), arguments.json)


def hybrid(arguments: argparse.Namespace) -> None:
    """Decode steps of GPU and CPU together, and the hand-over between them."""
    from headwater.bench.gpu.hybrid import Shape, bench_hybrid

    shape = Shape(arguments.shape, layers=arguments.layers, distinct=arguments.distinct)
    rows = bench_hybrid(
        shape,
        arguments.batches,
        arguments.context,
        arguments.spare_cpus,
        in_huge_pages=not arguments.small_pages,
    )
    show_all(rows, arguments.json)


def dual(arguments: argparse.Namespace) -> None:
    """Two micro-batches against one: where GPU and CPU take alike, and where one of them rules."""
    from headwater.bench.gpu.hybrid import Shape, bench_dual

    layers = arguments.layers
    cases: dict[Shape, tuple[tuple[int, int], ...]] = {
        # Balanced: many small experts, of which halves share few, and as much to read of the
        # context as takes the GPU as long: 16 heads of keys, 64K tokens. No model is published so.
        Shape("qwen3-30b", 6, 2, 8, 256, 512, 16): ((16, 65536), (16, 49152), (16, 32768)),
        Shape(arguments.shape, layers, 2, 1, 128): ((32, 32768), (8, 4096)),
        Shape(arguments.shape, layers, 2, 1, 256): ((32, 32768), (32, 16384)),
        Shape(arguments.shape, layers, 2, 2, 512): ((8, 16384), (2, 1024)),
        Shape(arguments.shape, layers // 2, 2): ((2, 1024), (8, 16384)),
    }
    show_all(bench_dual(cases), arguments.json)


def beside(arguments: argparse.Namespace) -> None:
    """Decode steps while prompts stream through the same GPU."""
    from headwater.bench.gpu.beside import bench_beside
    from headwater.bench.gpu.hybrid import Shape

    rows = bench_beside(
        Shape(arguments.shape, layers=arguments.layers, distinct=arguments.distinct),
        arguments.batch,
        arguments.context,
        arguments.tokens,
        arguments.vram,
    )
    show_all(rows, arguments.json)


def beside_two(arguments: argparse.Namespace) -> None:
    """Decode steps on one GPU while prompts stream through another."""
    from headwater.bench.gpu.beside_two import Split, bench_beside_two
    from headwater.bench.gpu.hybrid import Shape

    rows = bench_beside_two(
        Shape(arguments.shape, layers=arguments.layers, distinct=arguments.distinct),
        arguments.batch,
        arguments.context,
        arguments.tokens,
        arguments.vram,
        arguments.shares,
        Split(spare_cpus=arguments.spare_cpus),
    )
    show_all(rows, arguments.json)


def numerics(arguments: argparse.Namespace) -> None:
    """Errors of the recipes, and of the kernels against them, at DeepSeek-V3's sizes."""
    import torch

    from headwater.bench.gpu.numerics import bench_numerics

    with torch.inference_mode():
        rows = bench_numerics(torch.device(arguments.device), arguments.tokens)
        show_all(rows, arguments.json)


def whole(arguments: argparse.Namespace) -> None:
    """Whole models after prompts of text, by every recipe, against the CPU's reference."""
    import torch
    from tokenizers import Tokenizer

    from headwater.bench.gpu.whole_model import bench_whole_model

    tokenizer = Tokenizer.from_file(str(arguments.folder / "tokenizer.json"))
    texts = [path.read_text() for path in arguments.texts]
    prompts = [tokenizer.encode(text).ids[: arguments.tokens] for text in texts]
    device = torch.device(arguments.device)
    rows = bench_whole_model(arguments.folder, prompts, device, arguments.other_isa)
    show_all(rows, arguments.json)


def main() -> None:
    """Runs the measurement that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("slp", help=slp.__doc__)
    command.set_defaults(run=slp)
    command.add_argument("--shape", default="deepseek-v3")
    command.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384, 32768, 65536])
    command.add_argument("--vram", type=float, default=32.0, help="GiB of device memory to use")
    command.add_argument("--distinct", type=int, default=7, help="routed layers that differ")
    command.add_argument("--experts", type=int, help="another number of experts per layer")
    command.add_argument("--quantize-from", type=int, default=0, help="0: never")
    command.add_argument("--json")
    command = commands.add_parser("dslp", help=dslp.__doc__)
    command.set_defaults(run=dslp)
    command.add_argument("--shape", default="deepseek-v3")
    command.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384, 32768, 65536])
    command.add_argument("--together", type=int, nargs="+", default=[8192, 32768, 65536])
    command.add_argument("--ranks", type=int, default=2)
    command.add_argument("--vram", type=float, default=32.0, help="GiB of device memory to use")
    command.add_argument("--distinct", type=int, default=7, help="routed layers that differ")
    command.add_argument("--quantize-from", type=int, default=0, help="0: never")
    command.add_argument("--json")
    command = commands.add_parser("products", help=products.__doc__)
    command.set_defaults(run=products)
    command.add_argument("--rows", type=int, nargs="+", default=[32, 256, 1024], help="per expert")
    command.add_argument(
        "--tiles", nargs="+", default=["64x128x8x3"], help="tokens x rows x warps x stages"
    )
    command.add_argument("--json")
    command = commands.add_parser("hybrid", help=hybrid.__doc__)
    command.set_defaults(run=hybrid)
    command.add_argument("--shape", default="deepseek-v3")
    command.add_argument("--layers", type=int)
    command.add_argument("--distinct", type=int, default=4)
    command.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8])
    command.add_argument("--context", type=int, default=2048)
    command.add_argument("--spare-cpus", type=int, default=0, help="CPUs that decode leaves")
    command.add_argument(
        "--small-pages", action="store_true", help="weights in a memfd, with the kernel's pages"
    )
    command.add_argument("--json")
    command = commands.add_parser("dual", help=dual.__doc__)
    command.set_defaults(run=dual)
    command.add_argument("--shape", default="deepseek-v3")
    command.add_argument("--layers", type=int, default=8)
    command.add_argument("--json")
    command = commands.add_parser("beside", help=beside.__doc__)
    command.set_defaults(run=beside)
    command.add_argument("--shape", default="deepseek-v3")
    command.add_argument("--layers", type=int)
    command.add_argument("--distinct", type=int, default=2)
    command.add_argument("--batch", type=int, default=1)
    command.add_argument("--context", type=int, default=2048)
    command.add_argument("--tokens", type=int, default=8192, help="tokens of a sweep")
    command.add_argument("--vram", type=float, default=32.0, help="GiB that prefill uses")
    command.add_argument("--json")
    command = commands.add_parser("beside-two", help=beside_two.__doc__)
    command.set_defaults(run=beside_two)
    command.add_argument("--shape", default="deepseek-v3")
    command.add_argument("--layers", type=int)
    command.add_argument("--distinct", type=int, default=2)
    command.add_argument("--batch", type=int, default=1)
    command.add_argument("--context", type=int, default=2048)
    command.add_argument("--tokens", type=int, default=8192, help="tokens of a sweep")
    command.add_argument("--vram", type=float, default=32.0, help="GiB that prefill uses")
    command.add_argument("--shares", type=float, nargs="+", default=[1.0, 0.8, 0.6, 0.4])
    command.add_argument("--spare-cpus", type=int, default=4, help="CPUs that decode leaves")
    command.add_argument("--json")
    command = commands.add_parser("numerics", help=numerics.__doc__)
    command.set_defaults(run=numerics)
    command.add_argument("--device", default="cuda:0")
    command.add_argument("--tokens", type=int, default=256)
    command.add_argument("--json")
    command = commands.add_parser("whole", help=whole.__doc__)
    command.set_defaults(run=whole)
    command.add_argument("folder", type=Path, help="a model")
    command.add_argument("texts", type=Path, nargs="+", help="files whose beginnings are prompts")
    command.add_argument("--tokens", type=int, default=400)
    command.add_argument("--device", default="cpu")
    command.add_argument("--other-isa", default="avx2")
    command.add_argument("--json")
    arguments = parser.parse_args()
    arguments.run(arguments)


# Its own processes import this file again.
if __name__ == "__main__":
    main()
