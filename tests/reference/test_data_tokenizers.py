"""Tokenizers from training text, what they are accepted for, and ids on disk."""

import os
import subprocess
import sys

import pytest
import torch
from data_folders import write_folder

from reference.data.acceptance import (
    CHANGED,
    EXACT,
    PROBES,
    REFUSED,
    accept,
    main,
    written_slices,
)
from reference.data.bpe import train_bpe, train_characters
from reference.data.ids import id_dtype_name, read_ids, write_ids
from reference.data.json_tokenizer import JsonTokenizer
from reference.data.open_tokenizer import open_tokenizer
from reference.data.policy import PackingPolicy
from reference.data.tokenizer import ByteTokenizer

TEXTS = [b"the cat sat on the mat, the cat sat\n" * 4, "Straße 東京\n".encode() * 3]
PROGRAM = """
import sys, hashlib
from reference.data.bpe import train_bpe
print(hashlib.sha256(train_bpe([sys.argv[1].encode()] * 3, 300)).hexdigest())
"""


def opened(tmp_path, content, eos=0):
    (tmp_path / "tokenizer.json").write_bytes(content)
    return open_tokenizer(tmp_path, eos)


def test_a_bpe_does_not_depend_on_threads_or_hash_seeds():
    text = "some words come back, some words come again, " * 20
    hashes = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM, text],
            env={**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for threads in ("1", "2", "4")
    }
    assert len(hashes) == 1


def test_every_kind_is_opened_by_what_the_folder_holds(tmp_path):
    text = "the cat, 東京".encode()
    for content, eos in (
        (ByteTokenizer.file_bytes, 256),
        (train_bpe(TEXTS, 300), 0),
        (train_characters(TEXTS), 0),
    ):
        tokenizer = opened(tmp_path, content, eos)
        assert tokenizer.file_bytes == content and tokenizer.eos == eos
        document = tokenizer.encode_document(text)
        assert tokenizer.decode(document) == text and int(document[-1]) == eos
        [again] = tokenizer.encode_documents([text])
        assert torch.equal(again, document)


def test_bytes_have_one_end_only(tmp_path):
    with pytest.raises(ValueError, match="is of bytes, whose eos is 256, not 0"):
        opened(tmp_path, ByteTokenizer.file_bytes, 0)
    with pytest.raises(ValueError, match="cannot read the tokenizer"):
        open_tokenizer(tmp_path / "none.json")


@pytest.mark.parametrize("character", ["z", "\u3000", "\U0001f600"])
def test_an_unknown_character_is_named(tmp_path, character):
    tokenizer = opened(tmp_path, train_characters([b"abc d"]))
    code = rf"U\+{ord(character):04X}"
    with pytest.raises(ValueError, match=code):
        tokenizer.encode(f"ab{character}".encode())
    with pytest.raises(ValueError, match=f"document 2: .*{code}"):
        tokenizer.encode_documents([b"ab", character.encode()])


def test_an_unknown_word_is_named_with_its_document(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<end>": 0, "<unk>": 1, **{w: i for i, w in enumerate(["a", "b", "ab"], 2)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    opened_again = opened(tmp_path, tokenizer.to_str().encode())
    with pytest.raises(ValueError, match="document 2: 'ba' is not in"):
        opened_again.encode_documents([b"ab a", b"ab ba"])


@pytest.mark.parametrize(
    ("texts", "size", "message"),
    [
        (TEXTS, 256, "vocabulary_size is 256; the bytes and the end of a text need 257"),
        ([], 300, "no text to make a tokenizer from"),
        ([b"", b""], 300, "no text"),
        ([b"good", b"bad \xff"], 300, r"text 2: byte 4 \(0xff\) is not UTF-8"),
    ],
)
def test_no_bpe_of_what_is_no_text(texts, size, message):
    with pytest.raises(ValueError, match=message):
        train_bpe(texts, size)


def test_a_good_tokenizer_is_accepted(tmp_path):
    found = accept(opened(tmp_path, train_bpe(TEXTS, 300)), {"cats": TEXTS[:1], "odd": TEXTS[1:]})
    assert found.problems == []
    assert found.slices["cats"].num_bytes == len(TEXTS[0])
    tokens = sum(map(len, opened(tmp_path, train_bpe(TEXTS, 300)).encode_documents(TEXTS[:1])))
    assert found.slices["cats"].tokens_per_byte == tokens / len(TEXTS[0]) < 0.5
    outcomes = {**dict.fromkeys(PROBES, EXACT), "invalid bytes": REFUSED}
    assert found.probes == outcomes
    assert set(accept(ByteTokenizer(), {}).probes.values()) == {EXACT}


def test_what_a_tokenizer_loses_is_said(tmp_path):
    from tokenizers import Tokenizer, normalizers

    lossy = Tokenizer.from_str(train_bpe(TEXTS, 300).decode())
    lossy.normalizer = normalizers.Lowercase()
    (tmp_path / "tokenizer.json").write_text(lossy.to_str())
    tokenizer = JsonTokenizer(tmp_path, 0)
    found = accept(tokenizer, {"mixed": [b"lower", b"Upper", b"\xff"], "lower": [b"x"]})
    mixed = found.slices["mixed"]
    assert (mixed.num_documents, mixed.num_changed, mixed.num_refused) == (2, 1, 1)
    assert found.probes["special-token text"] == CHANGED  # [CLS] in capitals
    assert len(found.problems) == 2
    assert "document 2: it comes back changed from byte 0 on" in found.problems[0]


class EndsInside(ByteTokenizer):
    """Text that says <|endoftext|> gets the end's id."""

    def encode_document(self, data):
        parts = [self.encode(part) for part in data.split(b"<|endoftext|>")]
        return torch.cat([t for part in parts for t in (part, torch.tensor([self.eos]))])


def test_an_end_inside_a_document_is_found():
    found = accept(EndsInside(), {"all": [b"fine", b"not <|endoftext|> fine"]})
    assert found.probes["special-token text"] == CHANGED
    assert "document 2: the end of a document stands inside it" in found.problems[0]


@pytest.mark.parametrize(
    ("size", "name"), [(1, "uint16"), (2**16, "uint16"), (2**16 + 1, "uint32"), (2**32, "uint32")]
)
def test_ids_are_as_wide_as_the_vocabulary_needs(size, name):
    assert id_dtype_name(size) == name
    tokens = torch.tensor([0, size - 1])
    assert read_ids(write_ids(tokens, size), size).tolist() == tokens.tolist()


def test_ids_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match=r"token 1 is 300; the vocabulary is 0..256"):
        write_ids(torch.tensor([1, 300]), 257)
    with pytest.raises(ValueError, match="token 0 is -1"):
        write_ids(torch.tensor([-1]), 257)
    with pytest.raises(ValueError, match="ids must be"):
        write_ids(torch.tensor([0.5]), 257)
    with pytest.raises(ValueError, match="3 bytes are no whole number of 2-byte ids"):
        read_ids(b"abc", 257)
    with pytest.raises(ValueError, match="id 65535 is not in the vocabulary"):
        read_ids(b"\xff\xff", 257)
    with pytest.raises(ValueError, match="must be in 1"):
        id_dtype_name(0)


def test_a_folder_is_accepted_slice_by_slice(tmp_path, capsys):
    texts = {
        "train": [[TEXTS, [b"in another shard"]], [[b"of b"]]],
        "validation": [[[b"held out"]]],
    }
    write_folder(tmp_path, texts, PackingPolicy(8))
    assert main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    num_bytes = sum(map(len, [*TEXTS, b"in another shard"]))
    assert lines[0] == (
        f"train source 0 all: {(num_bytes + 3) / num_bytes:.4f} tokens per byte, 3 documents, "
        "0 changed, 0 refused"
    )
    assert [line.partition(":")[0] for line in lines[1:3]] == [
        "train source 1 all",
        "validation source 0 all",
    ]
    assert lines[3:] == [f"{name}: {EXACT}" for name in PROBES]


def test_a_document_that_is_not_what_was_tokenized_is_named(tmp_path):
    manifest = write_folder(tmp_path, {"train": [[TEXTS]], "validation": []}, PackingPolicy(8))
    shard = tmp_path / manifest.shards[0].tokens_file
    shard.write_bytes(shard.read_bytes().replace(b"c\0a\0t\0", b"d\0o\0g\0"))
    slices = written_slices(tmp_path, manifest, ByteTokenizer(), 9)
    with pytest.raises(ValueError, match=r"file 0 row 1 does not come back from train/shard-00000"):
        accept(ByteTokenizer(), slices)


def test_no_folder_is_no_success(tmp_path, capsys):
    with pytest.raises(SystemExit) as status:
        main([str(tmp_path)])
    assert status.value.code == 2 and "is no prepared data" in capsys.readouterr().err
