"""docs/api.md is what its generator makes of the protos, and all of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from docs.generate_api import PAGE, compile_protos, render

from headwater.wire.status import _BY_REASON

if TYPE_CHECKING:
    from google.protobuf.descriptor_pb2 import FileDescriptorSet


@pytest.fixture(scope="module")
def files() -> FileDescriptorSet:
    return compile_protos()


def test_the_page_is_up_to_date(files: FileDescriptorSet) -> None:
    """Otherwise: `python docs/generate_api.py`."""
    assert PAGE.read_text(encoding="utf-8") == render(files)


def test_the_page_tells_everything(files: FileDescriptorSet) -> None:
    page = PAGE.read_text(encoding="utf-8")
    for file in files.file:
        for service in file.service:
            assert f"\n## {service.name}\n" in page
            for method in service.method:
                assert f"\n**{method.name}** (" in page
        for message in file.message_type:
            section = page.partition(f"\n### {message.name}\n")[2].partition("\n### ")[0]
            for field in message.field:
                assert f"| {field.number} | `{field.name}` |" in section, message.name
        for enum in file.enum_type:
            for value in enum.value:
                assert f"| {value.number} | `{value.name}` |" in page
    for reason in _BY_REASON.keys() - {"HEADWATER"}:
        assert f"| `{reason}` |" in page


def test_every_link_leads_somewhere(files: FileDescriptorSet) -> None:
    page = render(files)
    headings = {line.lstrip("# ").lower() for line in page.splitlines() if line.startswith("#")}
    targets = {piece.partition(")")[0] for piece in page.split("](#")[1:]}
    assert targets <= headings
