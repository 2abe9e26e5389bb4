"""What data holds does not steer the terminal of who looks at it."""

import re

import pytest
from prepared import lines, prepared, texts

from reference.data import acceptance, trace
from reference.data.prepare_command import main
from reference.data.visible import visible

ESCAPE, TITLE, TURNED = "\x1b[31m", "\x1b]0;title\x07", "\u202egpj"
STEERS = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (ESCAPE, r"\x1b[31m"),
        (TITLE, r"\x1b]0;title\x07"),
        (TURNED, r"\u202egpj"),
        ("\x7f\x85\x9b", r"\x7f\x85\x9b"),
        ("a\tb\r\n", r"a\x09b\x0d\x0a"),
        ("\udce9", r"\udce9"),
        ("naïve 語 😀 \\x1b [bold]", "naïve 語 😀 \\x1b [bold]"),
    ],
)
def test_control_characters_are_spelled(text, shown):
    assert visible(text) == shown


def test_what_the_layout_needs_is_kept():
    assert visible("a\tb\n\x1b", keep="\n\t") == "a\tb\n\\x1b"


@pytest.fixture
def steering(tmp_path):
    """Sources whose texts, slices and file names hold what steers a terminal."""
    folder = tmp_path / f"files {ESCAPE}"
    folder.mkdir()
    for number, text in enumerate(texts(30)):
        (folder / f"{number} {TITLE.replace('/', '')}{TURNED}.txt").write_text(ESCAPE + text)
    rows = ({"text": TURNED + text, "topic": ESCAPE} for text in texts(30, seed=1))
    (tmp_path / "rows.jsonl").write_bytes(lines(rows))
    return [str(folder), f"{tmp_path / 'rows.jsonl'}?slice=topic"]


def test_nothing_of_the_data_reaches_the_terminal_raw(steering, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    out = str(tmp_path / "out")
    arguments = ["--out", out, "--window-tokens", "64", "--validation-fraction", "0.3"]
    assert main(["prepare", *steering, *arguments]) == 0
    assert main(["inspect", out, "--windows", "9"]) == 0
    assert trace.main([out, "--update", "1"]) == 0
    assert acceptance.main([out]) == 0
    said, told = capsys.readouterr()
    assert not STEERS.search(said + told)
    assert r"\x1b[31m" in said and r"\x1b]0;title\x07" in said and r"\u202e" in said


def test_a_refusal_names_what_it_found_visibly(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_bytes(lines([{f"field {ESCAPE}": "x"}]))
    with pytest.raises(SystemExit):
        main(["prepare", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "out")])
    told = capsys.readouterr().err
    assert not STEERS.search(told) and "has no field" in told


def test_a_drawing_of_odd_names_is_made(tmp_path, capsys):
    rows = ({"text": text, "topic": rf"$\bad{{ {ESCAPE} $"} for text in texts(40))
    (tmp_path / "rows.jsonl").write_bytes(lines(rows))
    prepared(tmp_path / "out", f"{tmp_path / 'rows.jsonl'}?slice=topic")
    file = tmp_path / "drawing.png"
    assert main(["inspect", str(tmp_path / "out"), "--drawing", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")
