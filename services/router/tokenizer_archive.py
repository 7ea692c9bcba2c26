"""The tokenizer files of a model folder as one zip, for gateways that tokenise themselves."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CHUNK_BYTES = 1 << 20
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "config.json",
)
# The same files must always give the same bytes, for receivers cache by the digest.
_ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class TokenizerArchive:
    """The zip and its SHA-256 in hexadecimal."""

    data: bytes
    sha256: str

    @classmethod
    def build(cls, model_dir: Path) -> TokenizerArchive:
        """Packs those of the usual tokenizer files that the folder holds."""
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in _FILES:
                path = model_dir / name
                if path.exists():
                    entry = zipfile.ZipInfo(name, _ZIP_EPOCH)
                    entry.compress_type = zipfile.ZIP_DEFLATED
                    archive.writestr(entry, path.read_bytes())
        data = buffer.getvalue()
        return cls(data, hashlib.sha256(data).hexdigest())

    def chunks(self) -> Iterator[tuple[bytes, str]]:
        """(bytes, digest) pairs; the digest is empty on all but the last."""
        for start in range(0, len(self.data), CHUNK_BYTES):
            is_last = start + CHUNK_BYTES >= len(self.data)
            yield self.data[start : start + CHUNK_BYTES], self.sha256 if is_last else ""
