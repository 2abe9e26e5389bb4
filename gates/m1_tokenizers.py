"""M1. Tokenizers lose nothing, text never becomes a special token, ids are stored whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, processors

from gates.sample_texts import KNOWN, ODD_TEXTS, TRAINING
from harness import gate
from reference.data.bpe import train_bpe, train_characters
from reference.data.tokenizer import ByteTokenizer

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<s>")
EXACT = "bytes, exact"
VOCABULARY = 350


def chat_tokenizer():
    """A tokenizer.json as chat models have them: special tokens, and one put before every text."""
    tokenizer = Tokenizer.from_str(train_bpe(TRAINING, VOCABULARY).decode())
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS[1:]])
    start = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", start)]
    )
    tokenizer.enable_truncation(64)
    tokenizer.enable_padding(pad_id=0)
    return tokenizer.to_str().encode()


FILES = {
    "bytes": lambda: ByteTokenizer.file_bytes,
    "bpe": lambda: train_bpe(TRAINING, VOCABULARY),
    "chat": chat_tokenizer,
    "characters": lambda: train_characters([KNOWN.encode()]),
}
EOS = {"bytes": ByteTokenizer.eos, "bpe": 0, "chat": 0, "characters": 0}


def opened(stack, kind, tmp_path):
    """The tokenizer on trial, and the file it was opened from."""
    file = tmp_path / "tokenizer.json"
    file.write_bytes(FILES[kind]())
    return stack.open_tokenizer(file, EOS[kind]), file


def texts_of(kind):
    """What this kind can hold: any bytes, any text, or text of the known characters."""
    if kind == "bytes":
        return st.one_of(st.binary(max_size=80), st.text(max_size=40).map(str.encode))
    if kind == "characters":
        return st.text(KNOWN, max_size=60).map(str.encode)
    # Unpaired surrogates are no characters: UTF-8 cannot hold them.
    letters = st.characters(exclude_categories=["Cs"])
    return st.text(letters, max_size=60).map(str.encode)


@gate(
    claim="every document comes back byte for byte, and ends with the only EOS it has",
    roles=["open_tokenizer"],
    not_claimed="that few tokens are needed; tokenizers that normalize their text",
    source="karpathy/minGPT#140, huggingface/transformers#31336: decode(encode(x)) == x",
)
@pytest.mark.parametrize("kind", FILES)
def test_round_trip(stack, kind, tmp_path, check, for_all):
    tokenizer, _ = opened(stack, kind, tmp_path)

    def measure(text):
        tokens = tokenizer.encode_document(text)
        values = tokens.tolist()
        check("dtype", str(tokens.dtype), equal="torch.int64", because="as declared")
        outside = sum(not 0 <= value < tokenizer.vocabulary_size for value in values)
        check("ids outside the vocabulary", outside, equal=0, because="ids are rows of a table")
        check("the last token is EOS", values[-1:], equal=[EOS[kind]], because="one ends each")
        ends = values.count(EOS[kind])
        check("EOS in a document", ends, equal=1, because="one ends each, none stands inside")
        same = tokenizer.decode(tokens) == text
        check("comes back", same, equal=True, because=EXACT)
        check("without EOS too", tokenizer.decode(tokens[:-1]) == text, equal=True, because=EXACT)
        alone = torch.equal(tokenizer.encode(text), tokens[:-1])
        check("encode is the document without EOS", alone, equal=True, because="one meaning")

    for text in ODD_TEXTS.values() if kind != "characters" else ():
        measure(text)
    for_all(text=texts_of(kind), max_examples=60)(measure)


@gate(
    claim="text that spells a special token is text: none of it becomes that token",
    roles=["open_tokenizer"],
    not_claimed="what a chat template does with its own special tokens",
    source="karpathy/minGPT#140, huggingface/transformers#31336: a user's text that looks like a "
    "special token is encoded to its id",
)
@pytest.mark.parametrize("kind", ["bytes", "bpe", "chat"])
def test_special_text(stack, kind, tmp_path, check, for_all):
    tokenizer, file = opened(stack, kind, tmp_path)
    special = {ByteTokenizer.eos}
    if kind != "bytes":
        plain = Tokenizer.from_file(str(file))
        special = {number for number in map(plain.token_to_id, SPECIALS) if number is not None}

    @for_all(
        parts=st.lists(st.sampled_from([*SPECIALS, "a", " ", "<", "|>"]), max_size=8),
        max_examples=40,
    )
    def _(parts):
        text = "".join(parts).encode()
        values = tokenizer.encode_document(text).tolist()
        found = sum(value in special for value in values[:-1])
        check("special tokens in a text", found, equal=0, because="nobody put them there")
        same = tokenizer.decode(tokenizer.encode(text)) == text
        check("comes back", same, equal=True, because=EXACT)


@gate(
    claim="a document's tokens are those of its whole text, whatever is encoded beside it",
    roles=["open_tokenizer"],
    not_claimed="speed",
    source="wind-wing234/cs336-assignment1-basics#1: training and inference cut the text at "
    "different places, and tokens at the cuts differ",
)
@pytest.mark.parametrize("kind", ["bytes", "bpe", "chat"])
def test_documents_apart(stack, kind, tmp_path, check, for_all):
    tokenizer, file = opened(stack, kind, tmp_path)
    long = [b" indentation" * 800, b"x" * 30_000, b"\n\n" + b" " * 5_000 + b"return"]

    def alone(text):
        if kind == "bytes":
            return [*text, ByteTokenizer.eos]
        plain = Tokenizer.from_file(str(file))
        plain.no_truncation()
        plain.no_padding()
        plain.encode_special_tokens = True
        return [*plain.encode(text.decode(), add_special_tokens=False).ids, EOS[kind]]

    def measure(texts):
        got = [tokens.tolist() for tokens in tokenizer.encode_documents(texts)]
        check("documents", len(got), equal=len(texts), because="as many as were given")
        wrong = sum(mine != alone(text) for mine, text in zip(got, texts, strict=True))
        check("documents with other tokens", wrong, equal=0, because="the library's, on the whole")

    measure([*long, b"", *long[::-1]])
    for_all(texts=st.lists(texts_of(kind), max_size=5), max_examples=30)(measure)


UNREADABLE = {
    "bpe": (b"caf\xe9 au lait", "byte 3"),
    "chat": (b"\xf0\x9f\x98", "byte 0"),
    "characters": ("known \u3000 unknown".encode(), "U+3000"),
}


@gate(
    claim="what a tokenizer cannot hold is refused, naming it; nothing takes its place",
    roles=["open_tokenizer"],
    not_claimed="that the text is worth having",
    source="invalid UTF-8 that becomes U+FFFD is other text, and counts other bytes: "
    "karpathy/nanochat PR#693",
)
@pytest.mark.parametrize("kind", UNREADABLE)
def test_refused_text(stack, kind, tmp_path, check):
    tokenizer, _ = opened(stack, kind, tmp_path)
    text, word = UNREADABLE[kind]
    for name, encode in (
        ("encode", tokenizer.encode),
        ("encode_document", tokenizer.encode_document),
        ("encode_documents", lambda data: tokenizer.encode_documents([b"known", data])),
    ):
        try:
            encode(text)
            outcome = "encoded"
        except ValueError as error:
            outcome = f"refused, naming {word}" if word in str(error) else f"refused: {error}"
        want = f"refused, naming {word}"
        check(f"outcome of {name}", outcome, equal=want, because="it is another text without it")


VOCABULARIES = st.sampled_from([1, 257, 2**15 + 1, 2**16 - 1, 2**16, 2**16 + 1, 119_547, 2**31])


@gate(
    claim="ids come back from the disk as they were, little-endian, two bytes wide up to 65536",
    roles=["write_ids", "read_ids"],
    not_claimed="that a shard is whole (m0_manifest)",
    source="huggingface/transformers#2825, huggingface/datatrove#118: 16-bit ids: 70000 comes back "
    "as 4464",
)
def test_stored_ids(stack, check, for_all):
    @for_all(
        vocabulary_size=VOCABULARIES,
        places=st.lists(st.integers(1, 70_000), max_size=12),
        max_examples=60,
    )
    def _(vocabulary_size, places):
        last = vocabulary_size - 1
        tokens = torch.tensor([0, last, *(last % place for place in places), last])
        data = stack.write_ids(tokens, vocabulary_size)
        width = 2 if vocabulary_size <= 2**16 else 4
        check("bytes", len(data), equal=width * len(tokens), because="wide enough, and no wider")
        want = b"".join(value.to_bytes(width, "little") for value in tokens.tolist())
        check("the bytes are those declared", data == want, equal=True, because=EXACT)
        back = stack.read_ids(want, vocabulary_size)
        check("dtype", str(back.dtype), equal="torch.int64", because="as tensors of ids are")
        check("ids that are others", int((back != tokens).sum()), equal=0, because="exact")


@gate(
    claim="an id that is not in the vocabulary is refused when it is written and when it is read",
    roles=["write_ids", "read_ids"],
    not_claimed="that the vocabulary is the model's",
    source="mlfoundations/open_lm PR#77: id % vocabulary hides the wrong tokenizer",
)
@pytest.mark.parametrize("vocabulary_size", [257, 2**16, 119_547])
def test_refused_ids(stack, vocabulary_size, check):
    for name, attempt in {
        "write too large": lambda: stack.write_ids(
            torch.tensor([1, vocabulary_size, 2]), vocabulary_size
        ),
        "write negative": lambda: stack.write_ids(torch.tensor([3, -1]), vocabulary_size),
        "read too large": lambda: stack.read_ids(b"\xff" * 8, min(vocabulary_size, 2**16 - 1)),
        "read a part of an id": lambda: stack.read_ids(b"\x01\x00\x00", vocabulary_size),
    }.items():
        try:
            attempt()
            outcome = "done"
        except ValueError:
            outcome = "refused"
        because = "another tokenizer wrote it, or another program"
        check(f"outcome of {name}", outcome, equal="refused", because=because)


@gate(
    claim="the same texts make the same BPE, of the size asked for, that can spell every byte",
    roles=["train_bpe"],
    not_claimed="that the merges are the best ones; a new process (m1_new_process)",
    source="a tokenizer is named by the hash of its file; karpathy/minGPT#140",
)
def test_bpe(stack, check):
    first = stack.train_bpe(iter(TRAINING), VOCABULARY)
    again = stack.train_bpe(iter(TRAINING), VOCABULARY)
    check(
        "the same file again", first == again, equal=True, because="the texts and the size decide"
    )
    tokenizer = Tokenizer.from_str(first.decode())
    check("tokens", tokenizer.get_vocab_size(), equal=VOCABULARY, because="as many as asked for")
    check("id of the end", tokenizer.token_to_id("<|endoftext|>"), equal=0, because="declared")
    special = [number for number, _ in tokenizer.get_added_tokens_decoder().items()]
    check("special tokens", special, equal=[0], because="the end, and no other")
    for name, text in {**ODD_TEXTS, "all planes": "".join(map(chr, range(64, 55000, 61)))}.items():
        text = text if isinstance(text, str) else text.decode()
        ids = tokenizer.encode(text).ids
        check(f"{name} comes back", tokenizer.decode(ids) == text, equal=True, because=EXACT)
    num_tokens = sum(len(tokenizer.encode(text.decode()).ids) for text in TRAINING)
    per_byte = num_tokens / sum(map(len, TRAINING))
    because = "93 merges of a text that says the same again: far less than a token a byte"
    check("tokens per byte", per_byte, within=(0.1, 0.6), because=because)
