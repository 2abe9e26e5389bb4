"""M1. A packing policy does to labels, documents and positions what it says, and every token is
accounted for.
"""

from __future__ import annotations

from itertools import product

import torch
from hypothesis import strategies as st

from harness import gate
from reference.data.policy import CHOICES, PackingPolicy
from reference.window import NO_TARGET

EOS = 7
# No tokens; EOS alone; one token; less than a window, exactly one, one more; several.
LENGTHS = st.lists(st.sampled_from([0, 1, 2, 3, 5, 6, 7, 8, 17]), min_size=1, max_size=6)
WINDOW_TOKENS = st.integers(1, 7)
POLICIES = [dict(zip(CHOICES, words, strict=True)) for words in product(*CHOICES.values())]
EXACT = "integers, exact; every policy by itself"


def documents_of(lengths):
    """Documents of these lengths, each ended by EOS, in which no other token occurs twice."""
    documents, first = [], 100
    for length in lengths:
        ids = [*range(first, first + length - 1), EOS] if length else []
        documents.append(torch.tensor(ids, dtype=torch.int64))
        first += length
    return documents


def packed(stack, lengths, window_tokens, words):
    """The policy, and the rows of such documents; None for rows if the policy leaves none."""
    policy = PackingPolicy(window_tokens, **words)
    num_tokens = sum(lengths)
    if num_tokens == 0 or (policy.tail == "drop" and num_tokens <= window_tokens):
        return policy, None
    return policy, stack.pack(documents_of(lengths), window_tokens, policy.tail)


def expected(rows, policy):
    """What a model is to read and to predict, place by place: lists [rows][T]."""
    labels, documents, positions = [], [], []
    for tokens, owners in zip(rows.tokens.tolist(), rows.documents.tolist(), strict=True):
        row = []
        place, in_document = 0, []
        for t in range(policy.window_tokens):
            following = tokens[t + 1]
            same = owners[t] == owners[t + 1]
            asked = owners[t] >= 0 and owners[t + 1] >= 0
            asked = asked and (same or policy.boundary == "predict")
            asked = asked and (following != EOS or policy.eos == "predict")
            row.append(following if asked else NO_TARGET)
            place = place + 1 if t and owners[t] == owners[t - 1] else 0
            in_document.append(place if policy.positions == "restart" else t)
        labels.append(row)
        whole = policy.attention == "across"
        documents.append([min(owner, 0) if whole else owner for owner in owners[:-1]])
        positions.append(in_document)
    return {"labels": labels, "documents": documents, "positions": positions}


@gate(
    claim="labels, documents and positions are those of the declared policy, at every place",
    roles=["apply_policy", "pack", "make_labels"],
    not_claimed="that the model keeps to the documents (m1_documents)",
    source="pytorch/torchtitan PR#4075, meta-pytorch/torchtune#1177: boundary targets are a "
    "policy; huggingface/transformers#23530: so is the end of a document",
)
def test_policy(stack, check, for_all):
    @for_all(
        lengths=LENGTHS,
        window_tokens=WINDOW_TOKENS,
        words=st.sampled_from(POLICIES),
        max_examples=100,
    )
    def _(lengths, window_tokens, words):
        policy, rows = packed(stack, lengths, window_tokens, words)
        if rows is None:
            return
        read = stack.apply_policy(rows, policy, EOS, stack.make_labels)
        want = expected(rows, policy)
        same = torch.equal(read.input_ids, rows.tokens[:, :-1])
        check("the inputs are the rows'", same, equal=True, because=EXACT)
        real = rows.documents[:, :-1] >= 0
        for name in ("labels", "documents", "positions"):
            got, wanted = getattr(read, name), torch.tensor(want[name])
            shapes = list(got.shape)
            check(f"shape of {name}", shapes, equal=list(wanted.shape), because="[B, T]")
            wrong = (got != wanted) & (real | (name != "positions"))
            check(f"{name} that are wrong", int(wrong.sum()), equal=0, because=EXACT)


@gate(
    claim="tail 'wrap' fills the last row with the stream's first tokens, under other numbers",
    roles=["pack"],
    not_claimed="the other tails (m1_packing)",
    source="the declared tail policy: what is seen twice is said to be",
)
def test_wrapped_tail(stack, check, for_all):
    @for_all(lengths=LENGTHS.filter(any), window_tokens=WINDOW_TOKENS, max_examples=60)
    def _(lengths, window_tokens):
        documents = documents_of(lengths)
        stream = torch.cat(documents).tolist()
        owners = [number for number, length in enumerate(lengths) for _ in range(length)]
        rows = stack.pack(documents, window_tokens, "wrap")
        num_rows = max(-(-(len(stream) - 1) // window_tokens), 1)
        shape = [num_rows, window_tokens + 1]
        check("shape", list(rows.tokens.shape), equal=shape, because="the last row is full")
        wrong = strange = 0
        for row in range(num_rows):
            for t in range(window_tokens + 1):
                lap, place = divmod(row * window_tokens + t, len(stream))
                wrong += int(rows.tokens[row, t]) != stream[place]
                owner = owners[place] + lap * len(lengths)
                strange += int(rows.documents[row, t]) != owner
        check("tokens that are wrong", wrong, equal=0, because="the stream is gone round")
        because = "a document that comes again is another: nothing reaches over from its first time"
        check("documents that are wrong", strange, equal=0, because=because)


@gate(
    claim="more than 65536 documents, and documents of more than 65536 tokens, keep their numbers",
    roles=["pack"],
    not_claimed="speed",
    source="alasdairforsythe/tokenmonster#23, facebookresearch/fairseq#3765: in 16 bits a length "
    "of 65537 becomes 1",
)
def test_large_numbers(stack, check):
    num_short, length, window_tokens = 70_000, 70_001, 140_000
    documents = [torch.tensor([EOS])] * num_short + [torch.arange(length)]
    rows = stack.pack(documents, window_tokens, "drop")
    numbers = torch.arange(num_short + 1).clamp(max=num_short)
    numbers = torch.cat([numbers, numbers[-1:].expand(length - 1)])
    positions = torch.cat([torch.zeros(num_short, dtype=torch.int64), torch.arange(length)])
    for name, want in (("documents", numbers), ("positions", positions)):
        got = getattr(rows, name).long().flatten()
        check(f"number of {name}", len(got), equal=len(want), because="one row holds all")
        check(f"{name} that are wrong", int((got != want).sum()), equal=0, because="exact")


FIELDS = (
    "num_tokens",
    "num_rows",
    "num_targets",
    "num_repeated",
    "num_firsts",
    "num_dropped",
    "num_padding",
)


@gate(
    claim="tokens in = tokens trained + tokens left out as declared, and the account says how many",
    roles=["account", "pack", "apply_policy", "make_labels"],
    not_claimed="anything about the order (m1_order)",
    source="meta-pytorch/torchtune#1177: sum(len - 1) targets or total - 1; ml-explore/mlx-lm "
    "PR#1413: a tail that is dropped unsaid",
)
def test_account(stack, check, for_all):
    @for_all(
        lengths=LENGTHS,
        window_tokens=WINDOW_TOKENS,
        words=st.sampled_from(POLICIES),
        max_examples=100,
    )
    def _(lengths, window_tokens, words):
        policy, rows = packed(stack, lengths, window_tokens, words)
        said = stack.account(lengths, policy)
        want = counted(stack, lengths, policy, rows)
        for name in FIELDS:
            off = getattr(said, name) - want[name]
            check(f"{name}, said - counted", off, equal=0, because=EXACT)
        trained = said.num_targets - said.num_repeated
        left_out = said.num_firsts + said.num_ends + said.num_dropped
        missing = said.num_tokens - trained - left_out
        check("tokens without an account", missing, equal=0, because="all that comes in")


def counted(stack, lengths, policy, rows):
    """The account, counted in what is trained on."""
    num_tokens = sum(lengths)
    last = 0 if rows is None else rows.num_rows * policy.window_tokens  # the last target's place
    begins = [sum(lengths[:number]) for number, length in enumerate(lengths) if length]
    firsts = begins if policy.boundary == "ignore" else begins[:1]
    count = {
        **dict.fromkeys(FIELDS, 0),
        "num_tokens": num_tokens,
        "num_firsts": sum(place <= last for place in firsts),
        "num_dropped": max(num_tokens - 1 - last, 0),
    }
    if rows is None:
        return count
    labels = stack.apply_policy(rows, policy, EOS, stack.make_labels).labels
    places = torch.arange(rows.num_rows)[:, None] * policy.window_tokens
    asked = (places + torch.arange(1, policy.window_tokens + 1))[labels != NO_TARGET]
    return {
        **count,
        "num_rows": rows.num_rows,
        "num_targets": len(asked),
        "num_repeated": int((asked >= num_tokens).sum()),
        "num_padding": int((rows.documents < 0).sum()),
    }
