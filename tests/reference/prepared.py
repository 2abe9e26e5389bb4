"""Small sources for the tests of the preparation."""

import hashlib
import json
import random
from pathlib import Path

from reference.data.policy import PackingPolicy
from reference.data.prepare import PrepareSettings, prepare
from reference.data.sources import parse_sources


def settings(**changed):
    fields = {"policy": PackingPolicy(32), "validation_fraction": 0.3}
    return PrepareSettings(**{**fields, **changed})


def texts(num, seed=0, num_words=30):
    drawn = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz"
    return [
        " ".join("".join(drawn.choices(letters, k=6)) for _ in range(num_words)) for _ in range(num)
    ]


def text_folder(folder, num=40, seed=0):
    folder.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(texts(num, seed)):
        (folder / f"{number:03}.txt").write_text(text)
    return folder


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def prepared(directory, *sources, workers=1, **changed):
    parsed = parse_sources([str(source) for source in sources])
    return prepare(parsed, directory, settings(**changed), workers)


def content(directory):
    """{file: SHA-256} of everything in a folder."""
    return {
        file.relative_to(directory).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(Path(directory).rglob("*"))
        if file.is_file()
    }
