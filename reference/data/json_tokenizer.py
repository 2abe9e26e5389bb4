"""A `tokenizer.json`, as open weights come with, behind the interface of ByteTokenizer."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reference.config import DecoderConfig
from reference.data.text_batches import text_batches
from reference.data.tokenizer import ids_of_one_document

BATCH_CHARACTERS = 2**20  # the library keeps some hundred bytes of each token that it makes


class JsonTokenizer:
    """The tokenizer of a `tokenizer.json`, run by the library `tokenizers`.

    Text that spells a special token (`<|im_end|>`) is text: it becomes ordinary tokens, never that
    token's id. Nothing is put before or after the text, cut off or padded, whatever the file asks
    for. A token stands for any number of bytes: count bytes in the source.

    path: the file, or the folder that holds it. eos: the id that ends a document; None takes the
    one that tokenizer_config.json or config.json beside the file names.

    Attributes: vocabulary_size, the largest id plus one; eos; sha256 of the file; json_bytes and
    file_bytes, the file itself.

    Raises ValueError for a file that the library does not read, an eos that is not named or not in
    the vocabulary, or a special token whose spelling in a text would become its id.
    """

    def __init__(self, path: Path | str, eos: int | None = None) -> None:
        from tokenizers import Tokenizer

        path = Path(path)
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            self.json_bytes = file.read_bytes()
            self._tokenizer = Tokenizer.from_buffer(self.json_bytes)
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"cannot read the tokenizer {file}: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # the library's words for "as ordinary text"
        unknown = getattr(self._tokenizer.model, "unk_token", None)
        self._unknown = None if unknown is None else self._tokenizer.token_to_id(unknown)
        self._known: set[str] = set()  # characters that some token holds
        self.file_bytes = self.json_bytes
        self.sha256 = hashlib.sha256(self.json_bytes).hexdigest()
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocabulary_size = max(ids, default=-1) + 1
        self.eos = _eos_named_beside(file, self._tokenizer) if eos is None else eos
        spelling = self._tokenizer.id_to_token(self.eos)
        if spelling is None:
            raise ValueError(f"eos {self.eos} is not in the vocabulary of {file}")
        self._refuse_special_ids_in_text(spelling)

    def encode(self, data: bytes) -> Tensor:
        """[n] int64: the tokens of UTF-8 text.

        Raises ValueError naming the first byte that is not UTF-8, and a character or word that the
        vocabulary does not have: it would be left out, or become one token with all others.
        """
        return torch.tensor(self._ids(self._readable(data)), dtype=torch.int64)

    def encode_document(self, data: bytes) -> Tensor:
        """[n + 1] int64: the tokens of the whole text, then EOS."""
        return torch.cat((self.encode(data), torch.tensor([self.eos])))

    def encode_documents(self, documents: Iterable[bytes]) -> list[Tensor]:
        """Each document with its EOS, as encode_document has it; the library uses all cores.

        Raises ValueError as encode does, saying in which document, from 1.
        """
        texts = []
        for number, data in enumerate(documents):
            with _in_document(number):
                texts.append(self._readable(data))
        tokens: list[Tensor] = []
        for batch in text_batches(texts, BATCH_CHARACTERS):
            tokens += self._encoded(batch, len(tokens))
        return tokens

    def _encoded(self, texts: Sequence[str], num_before: int) -> list[Tensor]:
        try:
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # the library raises bare Exception where a word is unknown
            raise ValueError(f"the tokenizer cannot encode a document: {error}") from error
        tokens = []
        for number, encoding in enumerate(encodings):
            if self._unknown is not None and self._unknown in encoding.ids:
                with _in_document(num_before + number):
                    self._ids(texts[number])  # which says what is unknown
            tokens.append(torch.from_numpy(np.array([*encoding.ids, self.eos], dtype=np.int64)))
        return tokens

    def decode(self, tokens: Tensor) -> bytes:
        """The UTF-8 text of one document; an EOS at its end adds none.

        It is the inverse of the encodings where the tokenizer keeps its text: not where it
        normalizes it. Tokens that end inside a character give U+FFFD there.

        Raises ValueError for tokens that are not [n] integers, an id that is no token, or an EOS
        before the end: that is more than one document.
        """
        values = ids_of_one_document(tokens, self.eos)
        for value in set(values):
            if value < 0 or self._tokenizer.id_to_token(value) is None:
                raise ValueError(
                    f"token {values.index(value)} is {value}; the vocabulary is "
                    f"0..{self.vocabulary_size - 1}"
                )
        text: str = self._tokenizer.decode(values, skip_special_tokens=False)
        return text.encode("utf-8")

    def _readable(self, data: bytes) -> str:
        """The text; ValueError if it is not UTF-8 or has a character that no token can hold."""
        text = _text(data)
        for character in sorted(set(text) - self._known):  # the same one is named in every run
            # White space may be what separates tokens and become none.
            if not (self._ids(character) or character.isspace()):
                raise ValueError(f"no token can hold {character!r} (U+{ord(character):04X})")
            self._known.add(character)
        return text

    def _ids(self, text: str, unknown_is_an_error: bool = True) -> list[int]:
        try:
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:  # the library raises bare Exception where a word is unknown
            if not unknown_is_an_error:
                return []
            if len(text) == 1:
                raise ValueError(f"no token can hold {text!r} (U+{ord(text):04X})") from error
            raise ValueError(f"the tokenizer cannot encode {text[:40]!r}: {error}") from error
        ids: list[int] = encoding.ids
        if unknown_is_an_error and self._unknown in ids:
            start, stop = encoding.offsets[ids.index(self._unknown)]
            raise ValueError(f"{text[start:stop]!r} is not in the tokenizer's vocabulary")
        return ids

    def _refuse_special_ids_in_text(self, eos_spelling: str) -> None:
        added = self._tokenizer.get_added_tokens_decoder()
        special: dict[int, str] = {
            number: token.content for number, token in added.items() if token.special
        }
        special[self.eos] = eos_spelling
        for number, spelling in special.items():
            if number != self._unknown and number in self._ids(spelling, unknown_is_an_error=False):
                raise ValueError(
                    f"a text with {spelling!r} would get the special token {number}: the tokenizer "
                    f"does not mark it as special, or its vocabulary spells it"
                )


@contextmanager
def _in_document(number: int) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"document {number + 1:,}: {error}") from error


def require_belongs(config: DecoderConfig, tokenizer: Any, fields: Mapping[str, Any]) -> None:
    """ValueError unless the tokenizer can feed the model: every id has a row of the embedding, and
    its eos is one that `fields`, the model's config.json, name (if they name one).

    Another tokenizer of the same size and eos is not noticed: keep the sha256 of both.
    """
    if tokenizer.vocabulary_size > config.vocabulary_size:
        raise ValueError(
            f"the tokenizer's largest id is {tokenizer.vocabulary_size - 1}, the model's "
            f"vocabulary_size {config.vocabulary_size}: they do not belong together"
        )
    named = _ids(fields.get("eos_token_id"))
    if named and tokenizer.eos not in named:
        raise ValueError(
            f"the tokenizer ends a document with {tokenizer.eos}, config.json with eos_token_id "
            f"{fields['eos_token_id']}: they do not belong together"
        )


def _eos_named_beside(file: Path, tokenizer: Any) -> int:
    """tokenizer_config.json's eos_token, else config.json's eos_token_id if that is one id."""
    token = _fields(file.with_name("tokenizer_config.json")).get("eos_token")
    spelling = token.get("content") if isinstance(token, dict) else token
    if spelling is not None:
        number: int | None = tokenizer.token_to_id(spelling)
        if number is None:
            raise ValueError(f"eos_token {spelling!r} is not in the vocabulary of {file}")
        return number
    named = _ids(_fields(file.with_name("config.json")).get("eos_token_id"))
    if len(named) != 1:
        raise ValueError(
            f"the files beside {file} do not name one end of a document (eos_token in "
            f"tokenizer_config.json, eos_token_id in config.json: {named}); give its "
            f"id, on the command line as {file}?eos=ID"
        )
    return named[0]


def _ids(value: Any) -> list[int]:
    """config.json names no id, one, or a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]


def _fields(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"byte {error.start} (0x{data[error.start]:02x}) is not UTF-8; this tokenizer reads "
            f"UTF-8 text only"
        ) from error
