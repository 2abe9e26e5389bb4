"""The loss and its gradients, chunk by chunk of rows: all logits never exist at once.

The kernels of token_nll_kernels.py make S dlogits of a chunk, where S is the sum of its row's
exponentials; the products are torch's, and so is the division by S, on the smaller side of each:
dhidden = (S dlogits) W / S and dW = (S dlogits)^T (hidden / S).
"""

import torch
from torch import Tensor

from candidates.tilelang.dialect import NAMES, dialect_of, launch
from candidates.tilelang.matrix import line_multiple, with_padded_lines
from candidates.tilelang.token_nll_kernels import (
    FLOAT16_SCALE,
    divides_late,
    logit_gradients,
    logit_tiles,
    vocabulary_tile,
)

CHUNK_BYTES = 640 * 2**20  # at most, of a chunk's exponentials
CHUNK_ROWS = 128  # chunks are multiples of this
ESTIMATED = 32  # columns of which the largest logit is the estimate


def _rows_of_a_chunk(num_rows: int, bytes_of_a_row: int) -> int:
    """As few chunks as the limit allows, of about equal size: fewer additions to dW."""
    most = max(CHUNK_ROWS, CHUNK_BYTES // bytes_of_a_row // CHUNK_ROWS * CHUNK_ROWS)
    num_chunks = -(-num_rows // most)
    return -(-num_rows // (num_chunks * CHUNK_ROWS)) * CHUNK_ROWS


def loss_and_gradients(
    hidden: Tensor, weight: Tensor, labels: Tensor, dtype: str, needed: tuple[bool, bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """nll [M], and the gradients of its sum by hidden and weight, empty where not needed."""
    d, keep = dialect_of(hidden), any(needed)
    (num_rows, width), vocabulary = hidden.shape, weight.shape[0]
    columns = vocabulary_tile(d, vocabulary, dtype)
    num_tiles = -(-vocabulary // columns)
    nll = hidden.new_empty(num_rows, dtype=torch.float32)
    dhidden = hidden.new_empty(hidden.shape if needed[0] else (0,))
    dweight = weight.new_empty(weight.shape if needed[1] else (0,))
    if not num_rows:
        return nll, dhidden, dweight.zero_()
    size = _rows_of_a_chunk(num_rows, num_tiles * columns * hidden.element_size())
    buffer = hidden.new_empty(min(size, num_rows), num_tiles * columns if keep else 1)
    multiple = line_multiple(d, dtype)
    wide_hidden, wide_weight = (with_padded_lines(x, multiple) for x in (hidden, weight))
    for first in range(0, num_rows, size):
        rows = slice(first, min(first + size, num_rows))
        num = rows.stop - first
        bases, sums = (nll.new_empty(num, num_tiles) for _ in range(2))
        label_logits, factors = (nll.new_empty(num) for _ in range(2))
        estimates = (hidden[rows] @ weight[:ESTIMATED].T).amax(1)
        slopes = buffer[:num]
        launch(
            logit_tiles, d, (vocabulary, width if d.on_gpu else 0, dtype, keep), wide_hidden[rows],
            wide_weight, labels[rows], estimates, bases, sums, label_logits, slopes,
        )  # fmt: skip
        launch(
            logit_gradients, d, (vocabulary, columns, dtype, keep), labels[rows], bases, sums,
            label_logits, slopes.view(num, -1, columns if keep else 1), factors, nll[rows],
        )  # fmt: skip
        slopes = slopes[:, :vocabulary]
        if needed[0]:
            _put_dhidden(dhidden[rows], slopes, weight, factors[:, None])
        if needed[1]:
            _add_dweight(dweight, slopes, hidden[rows], factors[:, None], is_first=not first)
    return nll, dhidden, dweight


def _put_dhidden(dhidden: Tensor, slopes: Tensor, weight: Tensor, factors: Tensor) -> None:
    """dhidden [m, D] = (slopes [m, V] weight [V, D]) factors [m, 1], rounded once."""
    if not divides_late(NAMES[slopes.dtype]):
        torch.addmm(dhidden, slopes, weight, beta=0, alpha=1 / FLOAT16_SCALE, out=dhidden)
    elif slopes.dtype == torch.float32:
        torch.mm(slopes, weight, out=dhidden).mul_(factors)
    else:
        torch.mul(torch.mm(slopes, weight, out_dtype=torch.float32), factors, out=dhidden)


def _add_dweight(
    dweight: Tensor, slopes: Tensor, hidden: Tensor, factors: Tensor, is_first: bool
) -> None:
    """dweight [V, D] += slopes^T [V, m] (factors [m, 1] hidden [m, D]); the first chunk sets it."""
    alpha = 1 / FLOAT16_SCALE
    if divides_late(NAMES[slopes.dtype]):
        hidden, alpha = torch.mul(hidden, factors, out=torch.empty_like(hidden)), 1.0
    torch.addmm(dweight, slopes.T, hidden, beta=int(not is_first), alpha=alpha, out=dweight)
