"""Tokenizers that are made from training text: byte-level BPE, and characters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

END_OF_TEXT = "<|endoftext|>"
NUM_BYTES = 256


def train_bpe(
    texts: Iterable[bytes], vocabulary_size: int, end_of_text: str = END_OF_TEXT
) -> bytes:
    """A tokenizer.json of byte-level BPE: `end_of_text` is id 0 and no text's, then the 256 bytes,
    then one token a merge, the most frequent pair first, inside the words of GPT-2's pattern.

    The same texts give the same bytes. texts: UTF-8, of the training side only: a tokenizer that
    saw the evaluation text flatters it. vocabulary_size: reached if the texts have so many pairs.

    Raises ValueError as require_size does, for no text, and for text that is not UTF-8.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    require_size(vocabulary_size)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[end_of_text],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_decoded(texts), trainer)
    text: str = tokenizer.to_str()
    return text.encode("utf-8")


def require_size(vocabulary_size: int) -> None:
    """ValueError unless the bytes and the end of a text fit into a vocabulary of this size."""
    if vocabulary_size < NUM_BYTES + 1:
        raise ValueError(
            f"vocabulary_size is {vocabulary_size}; the bytes and the end of a text need "
            f"{NUM_BYTES + 1}"
        )


def train_characters(texts: Iterable[bytes], end_of_text: str = END_OF_TEXT) -> bytes:
    """A tokenizer.json in which a token is a character of the texts: `end_of_text` is id 0, the
    characters follow by their code points.

    A character that the texts do not have is refused when it is to be encoded. Raises ValueError
    for no text, and for text that is not UTF-8.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    seen: set[str] = set()
    for text in _decoded(texts):
        seen.update(text)
    characters = {character: number for number, character in enumerate(sorted(seen), 1)}
    tokenizer = Tokenizer(models.WordLevel({end_of_text: 0, **characters}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(end_of_text, special=True, normalized=False)])
    content: str = tokenizer.to_str()
    return content.encode("utf-8")


def _decoded(texts: Iterable[bytes]) -> Iterator[str]:
    """The texts as str. ValueError if there is no character, or one text is not UTF-8."""
    num_characters = 0
    for number, data in enumerate(texts, 1):
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"text {number}: byte {error.start} (0x{data[error.start]:02x}) is not UTF-8; only "
                f"the tokenizer of bytes takes it"
            ) from error
        num_characters += len(text)
        yield text
    if not num_characters:
        raise ValueError("no text to make a tokenizer from")
