"""Windows in memory: of several sources, each told from every other, and the rows of a text."""

from __future__ import annotations

from itertools import accumulate

import torch

from reference.data.loader import LoaderSettings
from reference.data.pack import Rows
from reference.data.policy import PackingPolicy
from reference.data.training_text import rows_sha256

TOKENS = 6  # inputs of a window
SEED = 5
# Windows of two sources with 0 to T targets: 36 that teach something, in updates of 4 a rank.
TARGETS = [[(5 * i) % 7 for i in range(31)], [TOKENS - i % 3 for i in range(10)]]
ALL_TARGETS = [*TARGETS[0], *TARGETS[1]]
PER_EPOCH = sum(count > 0 for count in ALL_TARGETS)


class ToyWindows:
    """Window n holds tokens n (T + 1) .. and has as many targets as are given for it.

    targets: for each source the supervised tokens of each of its windows, 0 to T.
    """

    eos = 0  # no token of a window: window 0 begins with T + 1

    def __init__(self, targets, sha256="toy"):
        self.policy = PackingPolicy(TOKENS)
        self.targets = [torch.tensor(counts) for counts in targets]
        self.first_windows = [0, *accumulate(map(len, targets))]
        self.sha256 = sha256

    @property
    def num_windows(self):
        return self.first_windows[-1]

    def read(self, numbers):
        places = torch.arange(TOKENS + 1)
        tokens = (numbers[:, None] + 1) * (TOKENS + 1) + places
        real = places <= torch.cat(self.targets)[numbers][:, None]
        documents = torch.where(real, numbers[:, None], -1).int()
        return Rows(tokens, documents, places.expand(tokens.shape))


class RowWindows:
    """Window n is row n; every token that goes on with its document is a target."""

    eos = 0  # which the policy does not ask for: an EOS is a target like any other token

    def __init__(self, rows):
        self._rows = rows
        self.policy = PackingPolicy(rows.row_tokens)
        self.targets = [(rows.documents[:, 1:] == rows.documents[:, :-1]).sum(1)]
        self.first_windows = [0, rows.num_rows]
        self.sha256 = rows_sha256(rows)

    def read(self, numbers):
        names = ("tokens", "documents", "positions")
        return Rows(*(getattr(self._rows, name)[numbers] for name in names))


def settings(**fields):
    return LoaderSettings(
        **{
            "seed": SEED,
            "num_updates": 24,
            "rows_per_microbatch": 2,
            "microbatches_per_window": 2,
            "num_workers": 0,
            **fields,
        }
    )


def numbers_of(window):
    """The windows that an update is made of, in order."""
    first = torch.cat([microbatch.input_ids[:, 0] for microbatch in window.microbatches])
    return (first // (TOKENS + 1) - 1).tolist()


def labels_of(window):
    """All targets of an update."""
    labels = torch.cat([microbatch.labels.flatten() for microbatch in window.microbatches])
    return labels[labels >= 0].tolist()
