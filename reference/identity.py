"""Hashes of what a run was made from, as a checkpoint keeps them."""

import hashlib
from pathlib import Path

from reference.data.folder_text import FolderText
from reference.data.open_tokenizer import Tokenizer
from reference.data.training_text import TrainingText


def identity_of(text: TrainingText | FolderText, tokenizer: Tokenizer) -> dict[str, str | None]:
    """SHA-256 in hexadecimal: manifest, of the rows to train on or of the folder's manifest, split
    and policy; tokenizer; code, of every file of `reference`; evaluation, as manifest, of what is
    held out.
    """
    return {
        "manifest": text.training_sha256,
        "tokenizer": tokenizer.sha256,
        "code": _code_sha256(Path(__file__).parent),
        "evaluation": text.held_out_sha256,
    }


def _code_sha256(room: Path) -> str:
    hashed = hashlib.sha256()
    for file in sorted(room.rglob("*.py")):
        content = file.read_bytes()
        hashed.update(f"{file.relative_to(room).as_posix()} {len(content)} ".encode() + content)
    return hashed.hexdigest()
