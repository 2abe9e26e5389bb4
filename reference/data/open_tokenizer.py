"""Any tokenizer that a folder of data, or of a model, comes with."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from torch import Tensor

from reference.data.json_tokenizer import JsonTokenizer
from reference.data.manifest import MANIFEST, TOKENIZER, read_manifest
from reference.data.source_folders import is_prepared
from reference.data.tokenizer import ByteTokenizer


class Tokenizer(Protocol):
    """Bytes to token ids and back. eos ends every document, and no text is encoded to it.

    file_bytes: what `open_tokenizer` reads again; sha256: of these; json_bytes: a tokenizer.json
    for other programs.
    """

    vocabulary_size: int
    eos: int
    sha256: str
    file_bytes: bytes

    @property
    def json_bytes(self) -> bytes: ...
    def encode(self, data: bytes) -> Tensor: ...
    def encode_document(self, data: bytes) -> Tensor: ...
    def encode_documents(self, documents: Iterable[bytes]) -> list[Tensor]: ...
    def decode(self, tokens: Tensor) -> bytes: ...


def open_tokenizer(path: Path | str, eos: int | None = None) -> Tokenizer:
    """The tokenizer of a file, or of tokenizer.json in a folder; bytes by their description.

    eos: as in JsonTokenizer; None takes that of the manifest in a folder of prepared data. Raises
    ValueError as JsonTokenizer does, for another eos than that of bytes, and for a manifest that is
    of another tokenizer or was changed.
    """
    path = Path(path)
    file = path / TOKENIZER if path.is_dir() else path
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read the tokenizer {file}: {error.strerror}") from error
    if content != ByteTokenizer.file_bytes:
        if eos is None and file.name == TOKENIZER and is_prepared(file.parent):
            eos = _eos_of_manifest(file, content)
        return JsonTokenizer(file, eos)
    if eos not in (None, ByteTokenizer.eos):
        raise ValueError(f"{file} is of bytes, whose eos is {ByteTokenizer.eos}, not {eos}")
    return ByteTokenizer()


def _eos_of_manifest(file: Path, content: bytes) -> int:
    record = read_manifest(file.parent, hash_files=False).tokenizer
    if record.sha256 != hashlib.sha256(content).hexdigest():
        raise ValueError(f"{file} was changed: its SHA-256 is not that of {MANIFEST} beside it")
    return record.eos
