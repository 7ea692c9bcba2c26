"""KV pages in which nothing has been written yet, and whoever reads them all the same is found."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwater.kv.layout import KvLayout
from headwater.kv.pages import KvPages

if TYPE_CHECKING:
    from headwater.model.spec import ModelSpec


def nan_pages(spec: ModelSpec, *, num_blocks: int, block_tokens: int) -> KvPages:
    """Pages full of NaN."""
    layout = KvLayout.of(spec, num_blocks=num_blocks, block_tokens=block_tokens)
    pages = KvPages.allocate(layout)
    for layer in pages.layers:
        layer.fill_(float("nan"))
    return pages
