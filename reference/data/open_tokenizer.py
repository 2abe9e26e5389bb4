"""Any tokenizer that a folder of data, or of a model, comes with."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from torch import Tensor

from reference.data.json_tokenizer import JsonTokenizer
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

    eos: as in JsonTokenizer. Raises ValueError as it does, and for another eos than that of bytes.
    """
    path = Path(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        is_bytes = file.read_bytes() == ByteTokenizer.file_bytes
    except OSError as error:
        raise ValueError(f"cannot read the tokenizer {file}: {error.strerror}") from error
    if not is_bytes:
        return JsonTokenizer(file, eos)
    if eos not in (None, ByteTokenizer.eos):
        raise ValueError(f"{file} is of bytes, whose eos is {ByteTokenizer.eos}, not {eos}")
    return ByteTokenizer()
