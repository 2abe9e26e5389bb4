"""Corpora: whole documents, none twice, a fixed order, a clear error for what is unreadable."""

import sysconfig
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from reference.data.corpus import (
    CorpusDocument,
    collect,
    language_documents,
    library_sources,
    python_documents,
    python_topics,
)


def write(root: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def test_topics_are_the_documentation_of_this_python():
    documents = list(python_topics())
    assert len(documents) == len(topics) > 50
    assert [document.name for document in documents] == sorted(f"topics/{name}" for name in topics)
    assert b"assert_stmt" in documents[0].data


def test_library_sources_are_the_files_byte_for_byte():
    root = Path(sysconfig.get_path("stdlib"))
    documents = list(islice(library_sources(), 20))
    for document in documents:
        assert document.data == (root / document.name.removeprefix("library/")).read_bytes()


def test_the_library_has_no_installed_package_and_no_test(tmp_path):
    files = {
        "site-packages/a.py": b"1",
        "dist-packages/a.py": b"2",
        "test/a.py": b"3",
        "lib2to3/tests/a.py": b"4",
        "testing.py": b"5",
        "notes.txt": b"6",
    }
    names = [document.name for document in library_sources(write(tmp_path, files))]
    assert names == ["library/testing.py"]


def test_library_order_is_by_path_whatever_the_order_of_creation(tmp_path):
    backwards = {name: name.encode() for name in ("z.py", "b/b.py", "b/a.py", "a.py")}
    documents = list(library_sources(write(tmp_path, backwards)))
    assert [d.name.removeprefix("library/") for d in documents] == [
        "a.py",
        "b/a.py",
        "b/b.py",
        "z.py",
    ]


def test_text_that_is_not_utf8_is_kept_as_it_is(tmp_path):
    (document,) = library_sources(write(tmp_path, {"latin.py": b"caf\xe9\x00\r\n"}))
    assert document.data == b"caf\xe9\x00\r\n"


def test_an_unreadable_file_is_an_error_that_names_it(tmp_path):
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere.py")
    with pytest.raises(ValueError, match=r"cannot read the corpus file .*gone\.py: No such file"):
        list(library_sources(tmp_path))


def test_a_missing_folder_is_an_error_that_names_it(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read the corpus folder .*nowhere"):
        list(library_sources(tmp_path / "nowhere"))


def test_a_file_instead_of_the_folder_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read the corpus folder .*a\.py"):
        list(library_sources(write(tmp_path, {"a.py": b"1"}) / "a.py"))


def test_exact_duplicates_and_empty_documents_are_removed_and_the_first_stays():
    texts = [b"one", b"", b"two", b"one", b"one ", b""]
    documents = [CorpusDocument(str(number), data) for number, data in enumerate(texts)]
    assert [document.name for document in collect(documents, 100)] == ["0", "2", "4"]


@pytest.mark.parametrize(("limit", "names"), [(3, "a"), (4, "a"), (5, "ab"), (6, "abc")])
def test_the_limit_cuts_between_documents(limit, names):
    documents = [CorpusDocument(n, t) for n, t in (("a", b"123"), ("b", b"45"), ("c", b"6"))]
    assert "".join(document.name for document in collect(documents, limit)) == names


def test_a_duplicate_does_not_count_towards_the_limit():
    documents = [CorpusDocument(n, t) for n, t in (("a", b"123"), ("b", b"123"), ("c", b"4"))]
    assert [document.name for document in collect(documents, 4)] == ["a", "c"]


def test_a_limit_that_leaves_nothing_is_refused():
    with pytest.raises(ValueError, match="max_bytes 2"):
        collect([CorpusDocument("a", b"123")], 2)


def test_python_documents_go_from_topics_to_sources():
    documents = python_documents(1_000_000)
    assert 800_000 < sum(len(document.data) for document in documents) <= 1_000_000
    rooms = [document.name.partition("/")[0] for document in documents]
    assert rooms == sorted(rooms, reverse=True) and set(rooms) == {"topics", "library"}
    assert len({document.sha256 for document in documents}) == len(documents)
    assert documents == python_documents(1_000_000)


def test_language_splits_and_seeds_are_different_draws_of_one_language():
    draws = {
        (split, seed): language_documents("easy", split, 200, seed)
        for split in ("train", "held_out")
        for seed in (0, 1)
    }
    assert draws["train", 0] == language_documents("easy", "train", 200, 0)
    texts = {tuple(document.text for document in documents) for documents in draws.values()}
    assert len(texts) == 4


def test_a_longer_draw_begins_with_the_shorter_one():
    assert language_documents("hard", "train", 9, 0)[:5] == language_documents(
        "hard", "train", 5, 0
    )


@pytest.mark.parametrize(
    ("difficulty", "split", "number", "message"),
    [("odd", "train", 1, "odd"), ("easy", "test", 1, "held_out"), ("easy", "train", -1, "-1")],
)
def test_bad_requests_say_what_is_wrong(difficulty, split, number, message):
    with pytest.raises(ValueError, match=message):
        language_documents(difficulty, split, number, 0)
