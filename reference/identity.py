"""Hashes of what a run was made from, as a checkpoint keeps them."""

import hashlib
from pathlib import Path

from reference.data.json_tokenizer import JsonTokenizer
from reference.data.tokenizer import ByteTokenizer
from reference.data.training_text import TrainingText, rows_sha256


def identity_of(
    text: TrainingText, tokenizer: ByteTokenizer | JsonTokenizer
) -> dict[str, str | None]:
    """SHA-256 in hexadecimal: manifest, of the training rows; tokenizer; code, of every file of
    `reference`; evaluation, of the held-out rows.
    """
    return {
        "manifest": rows_sha256(text.training),
        "tokenizer": _tokenizer_sha256(tokenizer),
        "code": _code_sha256(Path(__file__).parent),
        "evaluation": rows_sha256(text.held_out),
    }


def _tokenizer_sha256(tokenizer: ByteTokenizer | JsonTokenizer) -> str:
    if isinstance(tokenizer, JsonTokenizer):
        return tokenizer.sha256
    return hashlib.sha256(f"bytes, end of document {tokenizer.eos}".encode()).hexdigest()


def _code_sha256(room: Path) -> str:
    hashed = hashlib.sha256()
    for file in sorted(room.rglob("*.py")):
        content = file.read_bytes()
        hashed.update(f"{file.relative_to(room).as_posix()} {len(content)} ".encode() + content)
    return hashed.hexdigest()
