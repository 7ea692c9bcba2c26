"""Writes docs/api.md from the protos and the errors: `python docs/generate_api.py`.

Comments of the protos are the text, within that of docs/api_template.md. protoc, of the package
grpcio-tools, gives them as SourceCodeInfo (google/protobuf/descriptor.proto).
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)

from headwater.errors import HeadwaterError

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "api.md"
_TEMPLATE = ROOT / "docs" / "api_template.md"
_PACKAGE = ".headwater.v1."
# Where a declaration of a file is found: field numbers of the messages in descriptor.proto.
_FILE_MESSAGE, _FILE_ENUM, _FILE_SERVICE = 4, 5, 6
_MESSAGE_FIELD, _MESSAGE_ONEOF = 2, 8
_CHILD = 2  # a service's methods and an enum's values


@dataclass(frozen=True, slots=True)
class _Declarations:
    """The comments of one file, by the place of what they are about."""

    file: FileDescriptorProto
    comments: dict[tuple[int, ...], str]

    @classmethod
    def of(cls, file: FileDescriptorProto) -> _Declarations:
        return cls(
            file,
            {
                tuple(location.path): _prose(location.leading_comments)
                for location in file.source_code_info.location
                if location.leading_comments
            },
        )

    def about(self, *path: int) -> str:
        return self.comments.get(path, "")


def compile_protos() -> FileDescriptorSet:
    """All files of headwater.v1 with their comments.

    Raises subprocess.CalledProcessError when protoc refuses one.
    """
    protos = sorted((ROOT / "proto" / "headwater" / "v1").glob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "descriptors.binpb"
        subprocess.run(
            [sys.executable, "-m", "grpc_tools.protoc", "-I", str(ROOT / "proto")]
            + ["--include_source_info", f"--descriptor_set_out={target}", *map(str, protos)],
            check=True,
        )
        return FileDescriptorSet.FromString(target.read_bytes())


def render(files: FileDescriptorSet) -> str:
    """The whole page."""
    declared = [_Declarations.of(file) for file in files.file]
    # The front door first, and what it is made of next.
    declared.sort(key=lambda each: (each.file.name.partition("_service")[1] == "", each.file.name))
    declared.sort(key=lambda each: not each.file.name.endswith("router_service.proto"))
    parts: list[str] = []
    for each in declared:
        parts += _services(each)
    for each in declared:
        parts += _messages(each)
        parts += _enums(each)
    template = Template(_TEMPLATE.read_text(encoding="utf-8"))
    return template.substitute(declarations="\n".join(parts), errors="".join(_error_rows()))


def _services(declared: _Declarations) -> Iterator[str]:
    for i, service in enumerate(declared.file.service):
        yield f"## {service.name}\n\n{declared.about(_FILE_SERVICE, i)}\n"
        for j, method in enumerate(service.method):
            sends = _stream(method.client_streaming) + _linked(method.input_type)
            gives = _stream(method.server_streaming) + _linked(method.output_type)
            yield f"**{method.name}** ({sends}) returns ({gives})  "
            yield declared.about(_FILE_SERVICE, i, _CHILD, j) + "\n"


def _messages(declared: _Declarations) -> Iterator[str]:
    for i, message in enumerate(declared.file.message_type):
        yield f"### {message.name}\n"
        if about := declared.about(_FILE_MESSAGE, i):
            yield about + "\n"
        if not message.field:
            yield "Has no fields.\n"
            continue
        yield "| no. | field | type | meaning |\n|---|---|---|---|"
        for j, field in enumerate(message.field):
            about = declared.about(_FILE_MESSAGE, i, _MESSAGE_FIELD, j)
            if _is_of_oneof(field):
                oneof = message.oneof_decl[field.oneof_index].name
                rule = declared.about(_FILE_MESSAGE, i, _MESSAGE_ONEOF, field.oneof_index)
                about = f"{about} *One of `{oneof}`:* {rule}" if rule else about
            yield f"| {field.number} | `{field.name}` | {_type(message, field)} | {_cell(about)} |"
        yield ""


def _enums(declared: _Declarations) -> Iterator[str]:
    for i, enum in enumerate(declared.file.enum_type):
        yield f"### {enum.name}\n\n{declared.about(_FILE_ENUM, i)}\n"
        yield "| no. | value | meaning |\n|---|---|---|"
        yield from _values(declared, i, enum)
        yield ""


def _values(declared: _Declarations, i: int, enum: EnumDescriptorProto) -> Iterator[str]:
    for j, value in enumerate(enum.value):
        about = declared.about(_FILE_ENUM, i, _CHILD, j)
        if value.number == 0 and not about:
            about = "Not set."
        yield f"| {value.number} | `{value.name}` | {_cell(about)} |"


def _error_rows() -> Iterator[str]:
    for kind in _tree(HeadwaterError):
        if kind is HeadwaterError:
            continue
        names = {each.__name__ for each in kind.__mro__}
        details = "BadRequest" if "InvalidRequestError" in names else ""
        details = "RetryInfo" if "ResourceError" in names else details
        about = (inspect.getdoc(kind) or "").partition("\n\n")[0]
        yield f"| `{kind.reason()}` | {kind.status} | {details} | {_cell(about)} |\n"


def _tree(root: type[HeadwaterError]) -> Iterator[type[HeadwaterError]]:
    """Those of headwater.errors alone, in the order of their declaration."""
    if root.__module__ == HeadwaterError.__module__:
        yield root
        for child in root.__subclasses__():
            yield from _tree(child)


def _is_of_oneof(field: FieldDescriptorProto) -> bool:
    # protoc puts an `optional` scalar into a oneof of its own.
    return field.HasField("oneof_index") and not field.proto3_optional


def _type(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    name = _named(field)
    for nested in message.nested_type:
        if nested.options.map_entry and field.type_name.endswith(f".{message.name}.{nested.name}"):
            key, value = nested.field
            return f"map of {_named(key)} to {_named(value)}"
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {name}"
    if field.proto3_optional:
        return f"optional {name}"
    return name


def _named(field: FieldDescriptorProto) -> str:
    if field.type_name:
        return _linked(field.type_name)
    return FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()


def _linked(type_name: str) -> str:
    name = type_name.removeprefix(_PACKAGE)
    return f"[{name}](#{name.lower()})"


def _stream(is_stream: bool) -> str:
    return "stream of " if is_stream else ""


def _prose(comment: str) -> str:
    """Without line breaks inside a paragraph, and without what only matters to who edits it."""
    paragraphs = [" ".join(lines.split()) for lines in re.split(r"\n\s*\n", comment)]
    kept = (re.sub(r"The next available field number is \d+\.", "", p).strip() for p in paragraphs)
    return "\n\n".join(paragraph for paragraph in kept if paragraph)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(render(compile_protos()), encoding="utf-8")
