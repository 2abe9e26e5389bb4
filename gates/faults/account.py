"""Wrong and right ways to account for every token."""

from __future__ import annotations

from dataclasses import replace

from harness import benign, fault
from reference.data.account import Account

ACCOUNT = "m1_boundaries::test_account"


def account_of(reference, change):
    """An account in which the fields of `change(account, lengths, policy)` are others."""

    def account(lengths, policy):
        said = reference.account(lengths, policy)
        return Account(**{**vars(said), **change(said, lengths, policy)})

    return account


@fault(role="account", caught_by=ACCOUNT, seen_in="meta-pytorch/torchtune#1177")
def counts_boundary_targets(reference):
    """Counts sum(len) - 1 targets whatever the policy: those at boundaries are not trained on."""

    def account(lengths, policy):
        return reference.account(lengths, replace(policy, boundary="predict"))

    return account


@fault(role="account", caught_by=ACCOUNT, seen_in="ml-explore/mlx-lm PR#1413")
def does_not_mention_the_tail(reference):
    """What the tail drops is in no column."""
    return account_of(reference, lambda said, *_: {"num_dropped": 0})


@fault(role="account", caught_by=ACCOUNT, seen_in="own")
def counts_what_is_repeated_as_new(reference):
    """Targets that come a second time are counted as tokens of the text."""
    return account_of(reference, lambda said, *_: {"num_repeated": 0})


@fault(role="account", caught_by=ACCOUNT, seen_in="meta-pytorch/torchtune PR#1875")
def counts_padding_as_trained(reference):
    """Every place of a window is a trained token, padding too."""

    def places(said, lengths, policy):
        return {"num_targets": said.num_targets + said.num_padding}

    return account_of(reference, places)


@benign(
    role="account",
    accepted_by=ACCOUNT,
    because="the closed form and the count are two ways to the same numbers",
)
def counts_document_by_document(reference):
    """Goes through the stream token by token."""

    def account(lengths, policy):
        stream = [(number, t) for number, length in enumerate(lengths) for t in range(length)]
        width, num_tokens = policy.window_tokens, len(stream)
        full, left = divmod(max(num_tokens - 1, 0), width)
        is_short = policy.tail != "drop" and (left or (num_tokens == 1))
        num_rows = full + bool(is_short)
        counts = dict.fromkeys(KINDS, 0)
        last = num_rows * width
        for place in range(max(last + 1, num_tokens) if stream else 0):
            counts[_kind(place, stream, lengths, policy, last)] += 1
        return Account(
            num_tokens=num_tokens,
            num_rows=num_rows,
            num_targets=counts["targets"] + counts["again"],
            num_repeated=counts["again"],
            num_firsts=counts["firsts"],
            num_ends=counts["ends"],
            num_dropped=counts["dropped"],
            num_padding=counts["padding"],
        )

    return account


KINDS = ("targets", "again", "firsts", "ends", "dropped", "padding", "nothing")


def _kind(place, stream, lengths, policy, last):
    """What becomes of one place of the stream, padding and what is wrapped included."""
    if place >= len(stream) and policy.tail == "pad":
        return "padding"
    number, t = stream[place % len(stream)]
    if place > last:
        return "dropped"
    is_again = place >= len(stream)
    if place == 0 or (t == 0 and policy.boundary == "ignore"):
        return "nothing" if is_again else "firsts"
    if t == lengths[number] - 1 and policy.eos == "ignore":
        return "nothing" if is_again else "ends"
    return "again" if is_again else "targets"
