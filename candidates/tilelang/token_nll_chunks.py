"""The loss and its gradients, chunk by chunk of rows: all logits never exist at once.

The kernels of token_nll_kernels.py turn a chunk's logits into exponentials; their products are
torch's. Except in float16 these are S dlogits, S being the sum of a row's exponentials, and each
product is divided on its smaller side: dhidden = (e W) / S and dW = e^T (hidden / S). The label's
slope is in neither: dhidden gets its line of W, and dW (token_nll_weight.py) its rows of hidden.
"""

import torch
from torch import Tensor

from candidates.tilelang.dialect import dialect_of, launch
from candidates.tilelang.matrix import line_multiple, with_padded_lines
from candidates.tilelang.token_nll_kernels import (
    divides_late,
    logit_gradients,
    logit_tiles,
    vocabulary_tile,
    with_label,
)
from candidates.tilelang.token_nll_weight import WeightGradient, wide_product

# What a chunk needs, unless that made too many: the larger the weight is, the dearer is each
# addition to its gradient. With 0.9 times the weight training takes no more memory than Liger's.
LEAST_BYTES, MOST_BYTES, OF_WEIGHT = 400 * 2**20, 640 * 2**20, 0.9
# Each chunk rounds what was added up to dW before: 26 are 3 times as far off as one rounding, and
# as their number grows small additions are lost.
MOST_CHUNKS = 26
CHUNK_ROWS = 128  # chunks are multiples of this
ESTIMATED = 32  # columns of which the largest logit is the estimate


def _rows_of_a_chunk(num_rows: int, bytes_of_a_row: int, bytes_of_weight: int) -> int:
    """As few chunks as the limit allows, of about equal size, and never more than MOST_CHUNKS."""
    limit = min(max(OF_WEIGHT * bytes_of_weight, LEAST_BYTES), MOST_BYTES)
    most = max(CHUNK_ROWS, int(limit) // bytes_of_a_row // CHUNK_ROWS * CHUNK_ROWS)
    num_chunks = min(-(-num_rows // most), MOST_CHUNKS)
    return -(-num_rows // (num_chunks * CHUNK_ROWS)) * CHUNK_ROWS


class Chunks:
    """The rows in chunks of `size`, and what the kernels make of the logits of one.

    nll, shares and label_slopes, [M] in float32, are filled chunk by chunk.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, dtype: str, keep: bool
    ) -> None:
        self.d, self.dtype, self.keep = dialect_of(hidden), dtype, keep
        self.weight, self.labels = weight, labels
        (num_rows, width), self.vocabulary = hidden.shape, weight.shape[0]
        self.compiled_width = width if self.d.on_gpu else 0
        self.columns = vocabulary_tile(self.d, self.vocabulary, dtype)
        self.num_tiles = -(-self.vocabulary // self.columns)
        kept_columns = self.num_tiles * self.columns if keep else 1
        # Exponentials; hidden / S; dhidden before it is rounded, in float32.
        bytes_of_a_row = (kept_columns + width) * hidden.element_size() + width * 4
        self.size = _rows_of_a_chunk(num_rows, bytes_of_a_row, weight.nbytes)
        self.buffer = hidden.new_empty(min(self.size, num_rows), kept_columns)
        multiple = line_multiple(self.d, dtype)
        self.wide_hidden, self.wide_weight = (
            with_padded_lines(x, multiple) for x in (hidden, weight)
        )
        self.nll, self.shares, self.label_slopes = (
            hidden.new_empty(num_rows, dtype=torch.float32) for _ in range(3)
        )
        self.estimates = _estimates(hidden, weight) if divides_late(dtype) else self.nll  # not read

    def exponentials_of(self, rows: slice) -> Tensor:
        """Those of the rows, [rows, V]; of no use where they are not kept for a gradient."""
        num = rows.stop - rows.start
        bases, sums = (self.nll.new_empty(num, self.num_tiles) for _ in range(2))
        label_logits = self.nll.new_empty(num)
        kept = self.buffer[:num]
        parameters = (self.vocabulary, self.compiled_width, self.dtype, self.keep)
        launch(
            logit_tiles, self.d, parameters, self.wide_hidden[rows], self.wide_weight,
            self.labels[rows], self.estimates[rows], bases, sums, label_logits, kept,
        )  # fmt: skip
        parameters = (self.vocabulary, self.columns, self.dtype, self.keep)
        launch(
            logit_gradients, self.d, parameters, self.labels[rows], bases, sums, label_logits,
            kept.view(num, -1, self.columns if self.keep else 1), self.shares[rows],
            self.label_slopes[rows], self.nll[rows],
        )  # fmt: skip
        return kept[:, : self.vocabulary]

    def hidden_gradient(self, rows: slice, exponentials: Tensor, dhidden: Tensor) -> None:
        """dhidden [rows, D] from the exponentials and the label's line of W, rounded once."""
        launch(
            with_label, self.d, (self.compiled_width, self.dtype),
            wide_product(exponentials, self.weight), self.weight, self.labels[rows],
            self.shares[rows], self.label_slopes[rows], dhidden,
        )  # fmt: skip


def loss_and_gradients(
    hidden: Tensor, weight: Tensor, labels: Tensor, dtype: str, needed: tuple[bool, bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """nll [M], and the gradients of its sum by hidden and weight, empty where not needed."""
    num_rows = len(hidden)
    dhidden = hidden.new_empty(hidden.shape if needed[0] else (0,))
    if not num_rows:
        nll = hidden.new_empty(0, dtype=torch.float32)
        return nll, dhidden, weight.new_zeros(weight.shape if needed[1] else (0,))
    chunks = Chunks(hidden, weight, labels, dtype, keep=any(needed))
    gradient = None
    for first in range(0, num_rows, chunks.size):
        rows = slice(first, min(first + chunks.size, num_rows))
        exponentials = chunks.exponentials_of(rows)
        if needed[0]:
            chunks.hidden_gradient(rows, exponentials, dhidden[rows])
        if needed[1]:
            # Some 30 small kernels sort the labels: by now the device is at work meanwhile.
            gradient = gradient or WeightGradient(hidden, weight, labels)
            gradient.add(rows, exponentials, chunks.shares[rows])
    dweight = gradient.add_labels(chunks.label_slopes) if gradient else weight.new_empty(0)
    return chunks.nll, dhidden, dweight


def _estimates(hidden: Tensor, weight: Tensor) -> Tensor:
    """Of each row the largest of the first logits [m], not rounded: it must not be too high."""
    return wide_product(hidden, weight[:ESTIMATED].T).amax(1)
