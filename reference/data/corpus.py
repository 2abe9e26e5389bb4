"""Text that needs no download: the generated language, and what is written about Python in Python.

A corpus is a list of documents that are kept apart. The order is fixed: same input, same corpus.
"""

import hashlib
import os
import random
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from reference.data.grammar import LanguageDocument
from reference.data.language import language

SPLITS = ("train", "held_out")
# Installed packages are not the library, and a distribution may leave the library's tests out.
_NOT_THE_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})


@dataclass(frozen=True)
class CorpusDocument:
    """`name` says where the text is from; `data` is the text as it is stored, byte for byte."""

    name: str
    data: bytes

    @property
    def sha256(self) -> str:
        """The hash of the content alone, in hexadecimal."""
        return hashlib.sha256(self.data).hexdigest()


def language_documents(
    difficulty: str, split: str, num_documents: int, seed: int
) -> list[LanguageDocument]:
    """Independent draws from the language; "train" and "held_out" come from different generators.

    A short document may be drawn in both: that is what its probability says, and taking it out
    would make the rest unlike p. Raises ValueError for another difficulty or split, or a negative
    number.
    """
    if split not in SPLITS:
        raise ValueError(f"no split {split!r}; choose one of {', '.join(SPLITS)}")
    if num_documents < 0:
        raise ValueError(f"num_documents is {num_documents}, must not be negative")
    chosen = language(difficulty)
    rng = random.Random(f"{difficulty} {split} {seed}")
    return [chosen.sample(rng) for _ in range(num_documents)]


def python_topics() -> Iterator[CorpusDocument]:
    """The running Python's language reference as `help()` shows it, a topic a document, by name.

    Raises ValueError where this Python was installed without pydoc_data.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ValueError(
            f"this Python has no documentation topics ({error}); install its pydoc_data package"
        ) from error
    for name in sorted(topics):
        yield CorpusDocument(f"topics/{name}", topics[name].encode("utf-8"))


def library_sources(root: Path | None = None) -> Iterator[CorpusDocument]:
    """The sources of the running Python's library, a file a document, by path.

    root: the folder to read instead. Installed packages and tests are left out. Files are read as
    bytes, when their turn comes. Raises ValueError naming a file or folder that cannot be read.
    """
    if root is None:
        root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(_sources_below(root)):
        yield CorpusDocument(f"library/{path.relative_to(root).as_posix()}", _read(path))


def collect(documents: Iterable[CorpusDocument], max_bytes: int) -> list[CorpusDocument]:
    """The documents in order: no empty one, no content twice (by SHA-256; the first one stays), and
    together at most max_bytes. It stops before the first document that would pass the limit, so
    every document is whole.

    Raises ValueError if nothing is left.
    """
    kept: list[CorpusDocument] = []
    seen: set[str] = set()
    total = 0
    for document in documents:
        if not document.data or document.sha256 in seen:
            continue
        total += len(document.data)
        if total > max_bytes:
            break
        seen.add(document.sha256)
        kept.append(document)
    if not kept:
        raise ValueError(f"no document fits into max_bytes {max_bytes}; raise the limit")
    return kept


def python_documents(max_bytes: int) -> list[CorpusDocument]:
    """Real text without a download: the topics, then the library sources, by `collect`.

    max_bytes: about 450 kB hold all topics; sources follow, some 10 MB. Raises as its parts do.
    """
    return collect(_topics_then_sources(), max_bytes)


def _topics_then_sources() -> Iterator[CorpusDocument]:
    yield from python_topics()
    yield from library_sources()


def _sources_below(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root, onerror=_refuse_folder):
        folders[:] = [name for name in folders if name not in _NOT_THE_LIBRARY]
        yield from (Path(folder, name) for name in files if name.endswith(".py"))


def _refuse_folder(error: OSError) -> NoReturn:
    raise ValueError(f"cannot read the corpus folder {error.filename}: {error.strerror}") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read the corpus file {path}: {error.strerror}") from error
