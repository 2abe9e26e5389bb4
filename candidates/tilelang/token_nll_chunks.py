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
from candidates.tilelang.token_nll_labels import LabelCheck
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


def loss_and_gradients(
    hidden: Tensor, weight: Tensor, labels: Tensor, dtype: str, needed: tuple[bool, bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """nll [M], and the gradients of its sum by hidden and weight, empty where not needed.

    Raises ValueError for a label outside [0, V) that is not NO_TARGET.
    """
    d, keep = dialect_of(hidden), any(needed)
    (num_rows, width), vocabulary = hidden.shape, weight.shape[0]
    columns = vocabulary_tile(d, vocabulary, dtype)
    num_tiles = -(-vocabulary // columns)
    kept_columns = num_tiles * columns if keep else 1
    nll = hidden.new_empty(num_rows, dtype=torch.float32)
    dhidden = hidden.new_empty(hidden.shape if needed[0] else (0,))
    if not num_rows:
        return nll, dhidden, weight.new_zeros(weight.shape if needed[1] else (0,))
    check = gradient = None
    # Exponentials; hidden / S; dhidden before it is rounded, in float32.
    bytes_of_a_row = (kept_columns + width) * hidden.element_size() + width * 4
    size = _rows_of_a_chunk(num_rows, bytes_of_a_row, weight.nbytes)
    buffer = hidden.new_empty(min(size, num_rows), kept_columns)
    multiple = line_multiple(d, dtype)
    wide_hidden, wide_weight = (with_padded_lines(x, multiple) for x in (hidden, weight))
    estimates = _estimates(hidden, weight) if divides_late(dtype) else nll  # not read
    shares, label_slopes = (torch.empty_like(nll) for _ in range(2))
    for first in range(0, num_rows, size):
        rows = slice(first, min(first + size, num_rows))
        num = rows.stop - first
        bases, sums = (nll.new_empty(num, num_tiles) for _ in range(2))
        label_logits = nll.new_empty(num)
        exponentials = buffer[:num]
        launch(
            logit_tiles, d, (vocabulary, width if d.on_gpu else 0, dtype, keep), wide_hidden[rows],
            wide_weight, labels[rows], estimates[rows], bases, sums, label_logits, exponentials,
        )  # fmt: skip
        tiles = exponentials.view(num, -1, columns if keep else 1)
        launch(
            logit_gradients, d, (vocabulary, columns, dtype, keep), labels[rows], bases, sums,
            label_logits, tiles, shares[rows], label_slopes[rows], nll[rows],
        )  # fmt: skip
        exponentials = exponentials[:, :vocabulary]
        if needed[0]:
            product = wide_product(exponentials, weight)
            parameters = (width if d.on_gpu else 0, dtype)
            launch(
                with_label, d, parameters, product, weight, labels[rows], shares[rows],
                label_slopes[rows], dhidden[rows],
            )  # fmt: skip
        if not first:  # dozens of small kernels; the device is at work while they are launched
            check = LabelCheck(labels, vocabulary)
            gradient = WeightGradient(hidden, weight, labels) if needed[1] else None
        if gradient:
            gradient.add(rows, exponentials, shares[rows])
    dweight = gradient.add_labels(label_slopes) if gradient else weight.new_empty(0)
    check.raise_if_wrong()
    return nll, dhidden, dweight


def _estimates(hidden: Tensor, weight: Tensor) -> Tensor:
    """Of each row the largest of the first logits [m], not rounded: it must not be too high."""
    return wide_product(hidden, weight[:ESTIMATED].T).amax(1)
