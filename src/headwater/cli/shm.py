"""`headwater shm ls|reap`: what lies in /dev/shm, and the removal of what nobody needs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from headwater.cli.table import print_table
from headwater.shm import list_segments, reap

if TYPE_CHECKING:
    import argparse

    from headwater.config import Config
    from headwater.shm import SegmentInfo


def shm(arguments: argparse.Namespace, config: Config) -> int:
    """Lists or cleans the segments of this stack's prefix."""
    if arguments.action == "reap":
        removed = reap(config.shm.name_prefix, release_weights=arguments.release)
        print(json.dumps(removed) if arguments.json else "\n".join(removed) or "nothing to remove")
        return 0
    segments = list_segments(config.shm.name_prefix)
    if arguments.json:
        print(json.dumps([_as_dict(segment) for segment in segments], indent=2))
    else:
        _print_table(segments)
    return 0


def _as_dict(segment: SegmentInfo) -> dict[str, object]:
    return {
        "name": segment.name,
        "total_bytes": segment.total_bytes,
        "kind": segment.kind and segment.kind.name.lower(),
        "lifetime": segment.lifetime and segment.lifetime.name.lower(),
        "state": segment.state.value,
        "problem": segment.problem,
        "epoch": segment.epoch,
        "owner_pid": segment.owner_pid if segment.is_owner_alive else None,
        "is_attached": segment.is_attached,
    }


def _print_table(segments: list[SegmentInfo]) -> None:
    titles = ("NAME", "MIB", "KIND", "LIFETIME", "STATE", "OWNER", "ATTACHED")
    rows = [
        (
            entry["name"],
            f"{segment.total_bytes / 2**20:.1f}",
            entry["kind"] or "",
            entry["lifetime"] or "",
            f"{entry['state']} {entry['problem']}".strip(),
            entry["owner_pid"] or "none",
            "yes" if segment.is_attached else "no",
        )
        for segment in segments
        for entry in (_as_dict(segment),)
    ]
    print_table(titles, rows)
