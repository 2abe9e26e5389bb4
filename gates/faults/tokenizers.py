"""Wrong and right tokenizers."""

from __future__ import annotations

import unicodedata

import torch
from tokenizers import Tokenizer

from harness import benign, fault

GATE = "m1_tokenizers::"
ROUND, SPECIAL = f"{GATE}test_round_trip", f"{GATE}test_special_text"
APART, REFUSED = f"{GATE}test_documents_apart", f"{GATE}test_refused_text"


def of(gate, *kinds):
    return [f"{gate}[{kind}]" for kind in kinds]


class Wrapped:
    """A tokenizer that does all it does by the `encode` and `decode` of another."""

    def __init__(self, inner):
        self.inner = inner
        self.vocabulary_size, self.eos = inner.vocabulary_size, inner.eos

    def encode(self, data):
        return self.inner.encode(data)

    def encode_document(self, data):
        return torch.cat([self.encode(data), torch.tensor([self.eos])])

    def encode_documents(self, documents):
        return [self.encode_document(data) for data in documents]

    def decode(self, tokens):
        return self.inner.decode(tokens)


def reading(reference, change):
    """A tokenizer that reads `change(text)`, where it is UTF-8."""

    class Reading(Wrapped):
        def encode(self, data):
            try:
                return self.inner.encode(change(data.decode()).encode())
            except UnicodeDecodeError:
                return self.inner.encode(data)

    return lambda path, eos=None: Reading(reference.open_tokenizer(path, eos))


def wrapped(reference, kind):
    return lambda path, eos=None: kind(reference.open_tokenizer(path, eos))


# --- open_tokenizer --------------------------------------------------------------------------


@fault(role="open_tokenizer", caught_by=of(ROUND, "bytes", "bpe", "chat"), seen_in="own")
def composes_characters(reference):
    """Text is normalized before it is encoded: what was written differently becomes the same."""
    return reading(reference, lambda text: unicodedata.normalize("NFC", text))


@fault(role="open_tokenizer", caught_by=ROUND, seen_in="own")
def strips_white_space(reference):
    """White space at the ends of a document is left out."""
    return reading(reference, str.strip)


@fault(role="open_tokenizer", caught_by=of(ROUND, "bytes", "bpe", "chat"), seen_in="own")
def reads_in_text_mode(reference):
    """Every end of a line becomes a line feed, as a file opened as text is read."""
    return reading(reference, lambda text: text.replace("\r\n", "\n").replace("\r", "\n"))


@fault(role="open_tokenizer", caught_by=of(ROUND, "bytes", "bpe", "chat"), seen_in="own")
def drops_control_characters(reference):
    """Control characters are cleaned away."""
    return reading(reference, lambda text: "".join(c for c in text if c.isprintable() or c == "\n"))


@fault(role="open_tokenizer", caught_by=of(ROUND, "bytes", "bpe", "chat"), seen_in="own")
def truncates_long_documents(reference):
    """A document is cut off at 512 tokens, as the file's own truncation does."""

    class Truncated(Wrapped):
        def encode(self, data):
            return self.inner.encode(data)[:512]

    return wrapped(reference, Truncated)


@fault(role="open_tokenizer", caught_by=ROUND, seen_in="own")
def ends_no_document(reference):
    """No EOS is put at a document's end."""

    class Endless(Wrapped):
        def encode_document(self, data):
            return self.encode(data)

    return wrapped(reference, Endless)


@fault(role="open_tokenizer", caught_by=ROUND, seen_in="own")
def ends_a_document_twice(reference):
    """The tokenizer puts an EOS, and the one who packs another."""

    class Twice(Wrapped):
        def encode_document(self, data):
            return torch.cat([super().encode_document(data), torch.tensor([self.eos])])

    return wrapped(reference, Twice)


def plainly(path, **options):
    """`encode` of the library itself as a document's tokens, with the library's defaults."""
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()

    class Plain(Wrapped):
        def encode(self, data):
            ids = tokenizer.encode(data.decode(), **options).ids
            return torch.tensor(ids, dtype=torch.int64)

    return Plain


@fault(
    role="open_tokenizer",
    caught_by=of(SPECIAL, "bpe", "chat"),
    seen_in="karpathy/minGPT#140, huggingface/transformers#31336",
)
def encodes_special_text_to_its_id(reference):
    """A document that says <|endoftext|> gets the token that ends a document."""

    def open_tokenizer(path, eos=None):
        inner = reference.open_tokenizer(path, eos)
        if inner.vocabulary_size == 257:
            return inner
        return plainly(path, add_special_tokens=False)(inner)

    return open_tokenizer


@fault(role="open_tokenizer", caught_by=of(APART, "chat"), seen_in="own")
def puts_a_start_before_every_text(reference):
    """The file's post-processor is heeded: a token that is no text stands before each document."""

    class Started(Wrapped):
        def encode_documents(self, documents):
            if self.vocabulary_size == 257 or self.eos != 0:
                return self.inner.encode_documents(documents)
            start = torch.tensor([self.vocabulary_size - 1])
            return [torch.cat([start, tokens]) for tokens in self.inner.encode_documents(documents)]

    return wrapped(reference, Started)


@fault(
    role="open_tokenizer",
    caught_by=of(APART, "bpe", "chat"),
    seen_in="wind-wing234/cs336-assignment1-basics#1",
)
def encodes_in_chunks(reference):
    """Long documents are read in chunks of 1000 characters, and words are cut where those end."""

    class Chunked(Wrapped):
        def encode(self, data):
            try:
                text = data.decode()
            except UnicodeDecodeError:
                return self.inner.encode(data)
            chunks = [text[begin : begin + 1000] for begin in range(0, len(text), 1000)]
            parts = [self.inner.encode(chunk.encode()) for chunk in chunks]
            return torch.cat([torch.empty(0, dtype=torch.int64), *parts])

    return wrapped(reference, Chunked)


@fault(role="open_tokenizer", caught_by=APART, seen_in="own")
def pads_documents_to_the_longest(reference):
    """Documents that are encoded together come back equally long."""

    class Padded(Wrapped):
        def encode_documents(self, documents):
            tokens = self.inner.encode_documents(documents)
            longest = max(map(len, tokens), default=0)
            return [torch.cat([t, t.new_full((longest - len(t),), self.eos)]) for t in tokens]

    return wrapped(reference, Padded)


@fault(role="open_tokenizer", caught_by=APART, seen_in="own")
def leaves_out_empty_documents(reference):
    """A document without text is not in the list that comes back, so the others move up."""

    class Fewer(Wrapped):
        def encode_documents(self, documents):
            return self.inner.encode_documents([data for data in documents if data])

    return wrapped(reference, Fewer)


@fault(
    role="open_tokenizer",
    caught_by=of(REFUSED, "bpe", "chat"),
    seen_in="karpathy/nanochat PR#693",
)
def replaces_invalid_bytes(reference):
    """Bytes that are no UTF-8 become U+FFFD."""

    class Replacing(Wrapped):
        def encode(self, data):
            if self.vocabulary_size == 257:
                return self.inner.encode(data)
            return self.inner.encode(data.decode(errors="replace").encode())

    return wrapped(reference, Replacing)


@fault(role="open_tokenizer", caught_by=of(REFUSED, "characters"), seen_in="own")
def leaves_out_unknown_characters(reference):
    """Characters that the vocabulary does not have are left out."""

    class Leaving(Wrapped):
        def encode(self, data):
            try:
                return self.inner.encode(data)
            except ValueError:
                parts = [self._one(character) for character in data.decode()]
                return torch.cat([torch.empty(0, dtype=torch.int64), *parts])

        def _one(self, character):
            try:
                return self.inner.encode(character.encode())
            except ValueError:
                return torch.empty(0, dtype=torch.int64)

    return wrapped(reference, Leaving)


@benign(
    role="open_tokenizer",
    accepted_by=[ROUND, SPECIAL, APART, REFUSED],
    because="documents can be encoded one after the other as well as together",
)
def one_document_after_the_other(reference):
    """Encodes each document by itself."""
    return wrapped(reference, Wrapped)
