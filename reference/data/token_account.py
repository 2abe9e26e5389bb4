"""Where the tokens of a folder go, by split: read = targets + left out as the policy declares."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from rich.table import Table

from reference.data.account import Account, account
from reference.data.manifest import SPLITS, VALIDATION, Manifest, ShardRecord
from reference.data.policy import PackingPolicy
from reference.data.screen_table import add_row, screen_table
from reference.data.shards import open_documents


@dataclass(frozen=True)
class TokenAccount:
    """Of one split, over all its sources.

    num_read: tokens of the shards, EOS included, as the manifest says; num_targets: supervised
    tokens, each once; left_out: {reason: tokens that are no target}, of the reasons alone that the
    policy declares; num_windows: as a run has them, so none of a source without a target;
    num_repeated: targets that tail "wrap" has once more; num_padding: places that tail "pad" fills.
    """

    split: str
    num_read: int
    num_targets: int
    left_out: dict[str, int]
    num_windows: int
    num_repeated: int
    num_padding: int

    @property
    def num_missing(self) -> int:
        """num_read - num_targets - sum(left_out), which must be 0."""
        return self.num_read - self.num_targets - sum(self.left_out.values())


def token_accounts(manifest: Manifest, directory: Path | str) -> list[TokenAccount]:
    """Of every split, from the lengths in its tables; validation is read with tail "pad".

    Raises DataError, as `open_documents`, for a table that is not the manifest's.
    """
    declared = PackingPolicy.from_json(manifest.policy)
    return [
        _of_split(split, policy, manifest.shards_of(split), directory)
        for split in SPLITS
        for policy in [declared.for_evaluation() if split == VALIDATION else declared]
    ]


def account_table(accounts: list[TokenAccount]) -> Table:
    """A column a split, a row a sum: first what must agree, then what is besides."""
    table = screen_table(
        "tokens", *(one.split for one in accounts), title="account of the tokens, by packing policy"
    )
    reasons = dict.fromkeys(reason for one in accounts for reason in one.left_out)
    _add_counts(table, "read", [one.num_read for one in accounts])
    _add_counts(table, "targets, each once", [one.num_targets for one in accounts])
    for reason in reasons:
        _add_counts(table, reason, [one.left_out.get(reason) for one in accounts])
    _add_counts(table, "without an account", [one.num_missing for one in accounts])
    table.add_section()
    _add_counts(table, "targets once more (tail wrap)", [one.num_repeated for one in accounts])
    _add_counts(table, "padding (tail pad)", [one.num_padding for one in accounts])
    _add_counts(table, "windows", [one.num_windows for one in accounts])
    table.caption = f'{VALIDATION} is read with tail "pad"'
    return table


def disagreements(accounts: list[TokenAccount]) -> list[str]:
    """A sentence for each split whose sums do not agree."""
    return [
        f"the tokens of {one.split} do not add up: {one.num_read:,} read, {one.num_targets:,} are "
        f"targets and {sum(one.left_out.values()):,} left out as the packing policy declares; "
        f"{one.num_missing:+,} without an account"
        for one in accounts
        if one.num_missing
    ]


def _of_split(
    split: str, policy: PackingPolicy, shards: list[ShardRecord], directory: Path | str
) -> TokenAccount:
    found = []
    for source in sorted({shard.source for shard in shards}):  # each is a stream of its own
        lengths = [
            open_documents(directory, shard)["num_tokens"].to_numpy()
            for shard in shards
            if shard.source == source
        ]
        found.append(account(np.concatenate(lengths), policy))
    names = [field.name for field in fields(Account)]
    sums = Account(**{name: sum(getattr(one, name) for one in found) for name in names})
    with_targets = [one for one in found if one.num_targets]
    return TokenAccount(
        split=split,
        num_read=sum(shard.num_tokens for shard in shards),
        num_targets=sums.num_targets - sums.num_repeated,
        left_out=_declared(sums, policy),
        num_windows=sum(one.num_rows for one in with_targets),
        num_repeated=sums.num_repeated,
        num_padding=sum(one.num_padding for one in with_targets),
    )


def _declared(sums: Account, policy: PackingPolicy) -> dict[str, int]:
    """What the policy leaves out. What it does not declare is in no sum, and so does not pass."""
    if policy.boundary == "ignore":
        left_out = {"no target: first of a document (boundary ignore)": sums.num_firsts}
    else:
        left_out = {"no target: first of a source, nothing before it": sums.num_firsts}
    if policy.eos == "ignore":
        left_out["no target: EOS (eos ignore)"] = sums.num_ends
    if policy.tail == "drop":
        left_out["dropped: last window, not full (tail drop)"] = sums.num_dropped
    return left_out


def _add_counts(table: Table, name: str, counts: list[int | None]) -> None:
    add_row(table, name, *("" if count is None else f"{count:,}" for count in counts))
