"""Byte tokens: the way there and back loses nothing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reference.data.tokenizer import ByteTokenizer

tokenizer = ByteTokenizer()


@given(st.binary(max_size=300))
def test_any_bytes_come_back(data):
    tokens = tokenizer.encode(data)
    assert tokens.dtype == torch.int64 and len(tokens) == len(data)
    assert tokenizer.decode(tokens) == data
    assert tokenizer.decode(tokenizer.encode_document(data)) == data


def test_every_byte_is_its_own_token():
    assert tokenizer.encode(bytes(range(256))).tolist() == list(range(256))


@given(st.binary(max_size=50), st.integers(0, 50))
def test_encoding_does_not_depend_on_how_the_text_is_cut(data, cut):
    parts = torch.cat([tokenizer.encode(data[:cut]), tokenizer.encode(data[cut:])])
    assert torch.equal(parts, tokenizer.encode(data))


def test_a_document_ends_with_one_eos_and_every_token_is_in_the_vocabulary():
    tokens = tokenizer.encode_document(b"\xff\x00")
    assert tokens.tolist() == [255, 0, 256]
    assert tokens.max() < tokenizer.vocabulary_size


def test_the_empty_document_is_eos_alone():
    assert tokenizer.encode_document(b"").tolist() == [256]
    assert tokenizer.decode(torch.tensor([256])) == b""
    assert tokenizer.decode(torch.tensor([], dtype=torch.int64)) == b""


def test_text_that_looks_like_a_special_token_is_text():
    assert len(tokenizer.encode(b"<eos>")) == 5


def test_a_lone_continuation_byte_is_one_byte():
    assert tokenizer.decode(torch.tensor([0x80])) == b"\x80"


def test_documents_are_encoded_one_by_one():
    encoded = tokenizer.encode_documents([b"a", b"", b"bc"])
    assert [tokens.tolist() for tokens in encoded] == [[97, 256], [256], [98, 99, 256]]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.tensor([1, 257]), "token 1 is 257"),
        (torch.tensor([-1]), "token 0 is -1"),
        (torch.tensor([65, 256, 66]), "token 1 is EOS"),
        (torch.tensor([256, 256]), "token 0 is EOS"),
        (torch.tensor([[1]]), "one row"),
        (torch.tensor([1.0]), "integers"),
    ],
)
def test_what_is_not_one_document_is_refused(tokens, message):
    with pytest.raises(ValueError, match=message):
        tokenizer.decode(tokens)
