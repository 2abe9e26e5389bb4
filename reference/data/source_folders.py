"""Which files of a source folder are read, and how many of each kind are left out."""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from reference.data.manifest import FORMAT, MANIFEST, TOKENIZER
from reference.data.text_files import LINE_SUFFIXES, TABLE_SUFFIXES, TEXT_SUFFIXES, kind_of

HIDDEN, PREPARED, LINK, UNKNOWN, UNREADABLE_NAME = (
    "hidden", "prepared data", "symbolic links", "of no known kind", "with a name that is no UTF-8",
)  # fmt: skip
_WORK_FOLDER = re.compile(r"\..+\.prepare-[0-9a-f]{12}")


@dataclass(frozen=True)
class Below:
    """files: what is read, sorted; left_out: {reason: files and folders that are not}."""

    files: list[Path]
    left_out: dict[str, int] = field(default_factory=dict)


def files_below(root: Path, only: tuple[str, ...] = ()) -> Below:
    """Every file below a folder that is read; a file itself is its list.

    Left out are hidden files and folders (.git, .venv), folders that `prepare` made, symbolic
    links, names that are no UTF-8 and files of no known kind; a folder counts once. The work
    folders of `prepare` are left out and not counted: they come and go.

    only: endings of names, without the dot in front ("py", "txt.gz"); none: every known kind.
    Raises ValueError for a path that is not there, a file of an unknown kind, a folder that cannot
    be read, one without such a file, and one that is prepared already.
    """
    if root.is_file():
        if kind_of(root) is None:
            known = sorted(TEXT_SUFFIXES | LINE_SUFFIXES | TABLE_SUFFIXES)
            raise ValueError(
                f"{root}: no known kind of file; read are {' '.join(known)}, also with .gz or .zst"
            )
        return Below([root])
    if not root.is_dir():
        raise ValueError(f"no file or folder {root}")
    if is_prepared(root):
        raise ValueError(f"{root} is prepared data, not text; train on it with --data {root}")
    kept: list[Path] = []
    left_out: Counter[str] = Counter()
    for folder, folders, names in os.walk(root, onerror=_refuse_folder):
        _choose_folders(Path(folder), folders, left_out)
        for name in names:
            if only and not name.endswith(tuple(f".{end}" for end in only)):
                continue
            reason = _reason(Path(folder, name))
            if reason is None:
                kept.append(Path(folder, name))
            else:
                left_out[reason] += 1
    if not kept:
        which = f"that ends with {' or '.join(only)}" if only else "of a known kind"
        also = f"; left out: {counts_text(left_out)}" if left_out else ""
        raise ValueError(f"{root} holds no file {which}: the source is empty{also}")
    return Below(sorted(kept), dict(sorted(left_out.items())))


def is_prepared(folder: Path) -> bool:
    """Whether the folder is one that `prepare` made."""
    manifest = folder / MANIFEST
    try:
        return (folder / TOKENIZER).is_file() and f'"{FORMAT}"'.encode() in manifest.read_bytes()
    except OSError:
        return False  # it has no manifest that can be read


def is_utf8(name: str) -> bool:
    """Whether the bytes of a file's name are UTF-8: Python stands half a surrogate for others."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def counts_text(counts: dict[str, int]) -> str:
    """ "3 hidden, 1 symbolic links"."""
    return ", ".join(f"{number:,} {reason}" for reason, number in sorted(counts.items()))


def _choose_folders(folder: Path, folders: list[str], left_out: Counter[str]) -> None:
    """Keeps in `folders`, in order, those that are gone into."""
    chosen = []
    for name in sorted(folders):
        path = folder / name
        if _WORK_FOLDER.fullmatch(name):
            continue
        if name.startswith("."):
            left_out[HIDDEN] += 1
        elif path.is_symlink():
            left_out[LINK] += 1
        elif not is_utf8(name):
            left_out[UNREADABLE_NAME] += 1
        elif is_prepared(path):
            left_out[PREPARED] += 1
        else:
            chosen.append(name)
    folders[:] = chosen


def _reason(path: Path) -> str | None:
    """Why a file is left out; None if it is read."""
    if path.name.startswith("."):
        return HIDDEN
    if path.is_symlink():
        return LINK
    if not is_utf8(path.name):
        return UNREADABLE_NAME
    return None if kind_of(path) is not None and path.is_file() else UNKNOWN


def _refuse_folder(error: OSError) -> NoReturn:
    raise ValueError(f"cannot read the folder {error.filename}: {error.strerror}") from error
