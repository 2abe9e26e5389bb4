"""Bytes as tokens: nothing to train, nothing that cannot be written, nothing lost."""

import hashlib
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor


class ByteTokenizer:
    """Token i is the byte i, for i in 0..255; token 256 ends a document (EOS).

    There is no special text: the bytes `<eos>` are five tokens. Encoding does not depend on how the
    text is cut, and a byte token stands for one byte, so n tokens of text are n bytes.
    """

    vocabulary_size = 257
    eos = 256
    # What stands in the place of a tokenizer.json: that of a library cannot hold all byte strings.
    file_bytes = b'{"type": "bytes", "eos": 256}'
    sha256 = hashlib.sha256(file_bytes).hexdigest()

    def encode(self, data: bytes) -> Tensor:
        """[len(data)] int64, one token a byte."""
        return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).astype(np.int64))

    def encode_document(self, data: bytes) -> Tensor:
        """[len(data) + 1] int64: the bytes, then EOS."""
        return torch.cat([self.encode(data), torch.tensor([self.eos])])

    def encode_documents(self, documents: Iterable[bytes]) -> list[Tensor]:
        """Each document with its EOS."""
        return [self.encode_document(data) for data in documents]

    def decode(self, tokens: Tensor) -> bytes:
        """The bytes of one document; an EOS at its end adds none. The inverse of both encodings.

        Raises ValueError for tokens that are not [n] integers, a token outside 0..256, or an EOS
        before the end: that is more than one document.
        """
        values = ids_of_one_document(tokens, self.eos)
        for value in set(values):
            if not 0 <= value < self.eos:
                place = values.index(value)
                raise ValueError(f"token {place} is {value}; byte tokens are 0..{self.eos}")
        return bytes(values)

    @property
    def json_bytes(self) -> bytes:
        """A tokenizer.json with the same ids for UTF-8 text, so that a model can be exported."""
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        letters = _letters_of_bytes()
        vocabulary = {letter: byte for byte, letter in enumerate(letters)}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken("<|endoftext|>", special=True)])  # gets 256
        text: str = tokenizer.to_str()
        return text.encode("utf-8")


def ids_of_one_document(tokens: Tensor, eos: int) -> list[int]:
    """The ids [n] without an EOS at their end.

    Raises ValueError for tokens that are not [n] integers, and for an EOS before the end.
    """
    if tokens.ndim != 1 or tokens.is_floating_point() or tokens.is_complex():
        raise ValueError(
            f"tokens must be one row of integers, got {tokens.dtype} {tuple(tokens.shape)}"
        )
    values: list[int] = tokens.tolist()
    if values and values[-1] == eos:
        values.pop()
    if eos in values:
        raise ValueError(f"token {values.index(eos)} is EOS, before the end; decode one document")
    return values


def _letters_of_bytes() -> list[str]:
    """The letter that stands for each byte in byte-level vocabularies.

    It is the byte's own where that can be seen, else the next unused one from 256 on. Source:
    Radford et al. 2019, the code of GPT-2.
    """
    seen = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)}
    seen |= set(range(ord("®"), ord("ÿ") + 1))
    unused = iter(range(256, 512))
    return [chr(byte if byte in seen else next(unused)) for byte in range(256)]
