"""Labels, by hand and against a loop."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reference.data.labels import make_labels


def by_loop(tokens, documents, policy):
    """The definition, one token at a time."""
    labels = []
    for row, owners in zip(tokens, documents, strict=True):
        for place in range(len(row)):
            last = place + 1 == len(row)
            padding = last or owners[place] < 0 or owners[place + 1] < 0
            crosses = not padding and policy == "inside" and owners[place] != owners[place + 1]
            labels.append(-100 if padding or crosses else row[place + 1])
    return labels


def test_by_hand():
    tokens = torch.tensor([[5, 6, 7, 8, 9, 9]])
    documents = torch.tensor([[0, 0, 1, 1, -1, -1]], dtype=torch.int32)
    inside = make_labels(tokens, documents, "inside")
    assert inside.tolist() == [[6, -100, 8, -100, -100, -100]]
    across = make_labels(tokens, documents, "across")
    assert across.tolist() == [[6, 7, 8, -100, -100, -100]]
    assert inside.dtype == torch.int64


def test_without_documents_a_row_is_one_document():
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    for policy in ("inside", "across"):
        assert make_labels(tokens, None, policy).tolist() == [[2, 3, -100], [5, 6, -100]]


@given(
    st.lists(st.lists(st.integers(-1, 2), min_size=7, max_size=7), min_size=1, max_size=3),
    st.sampled_from(["inside", "across"]),
)
def test_equals_the_loop(owners, policy):
    documents = torch.tensor(owners, dtype=torch.int32)
    tokens = torch.arange(documents.numel()).reshape(documents.shape)
    got = make_labels(tokens, documents, policy).flatten().tolist()
    assert got == by_loop(tokens.tolist(), owners, policy)


def test_the_tokens_are_left_alone():
    tokens = torch.tensor([[1, 2, 3]])
    make_labels(tokens, torch.tensor([[0, 1, 1]]), "inside")
    assert tokens.tolist() == [[1, 2, 3]]


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (3, 1)])
def test_rows_without_a_next_token_have_no_target(shape):
    labels = make_labels(torch.zeros(shape, dtype=torch.int64), None, "inside")
    assert labels.shape == shape and (labels == -100).all()


@pytest.mark.parametrize(
    ("tokens", "documents", "policy", "message"),
    [
        (torch.zeros(1, 3).long(), None, "between", "inside, across"),
        (torch.zeros(3).long(), None, "inside", r"\[rows, tokens\]"),
        (torch.zeros(1, 3).long(), torch.zeros(1, 4), "inside", r"\(1, 4\)"),
    ],
)
def test_bad_requests_say_what_is_wrong(tokens, documents, policy, message):
    with pytest.raises(ValueError, match=message):
        make_labels(tokens, documents, policy)
