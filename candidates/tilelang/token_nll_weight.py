"""The gradient of the loss by the weight, added up over chunks of rows.

dW_v = sum_m p_mv hidden_m - sum over the rows with label v of hidden_m, without the label's own
p - 1, which is one term in float32. The first sum is added up in dW's own dtype, which is enough
where there is nothing to cancel. For a frequent label the two sums nearly cancel, so for the 1024
most frequent labels of a call the first one is in float32 as well: a product with 1024 columns.
"""

from dataclasses import dataclass
from typing import Any

import tilelang.language as T
import torch
from torch import Tensor

from candidates.tilelang.dialect import Dialect, dialect_of, dtype_name, launch
from candidates.tilelang.token_nll_kernels import CPU_COLUMNS, FLOAT16_SCALE, divides_late

FREQUENT = 1024  # labels; any other has few rows
RUN_LINES, RUN_COLUMNS = 16, 256  # the tile of a sum over rows of one label


def with_rows_of_labels(d: Dialect, width: int, dtype: str) -> Any:
    """dweight_v += sum over the rows m with label v of label_slopes_m hidden_m, rounded once.

    labels [num_rows] are sorted, `order` says which row each was, and `ends` where the run of equal
    labels ends. The block of the first of a run adds it up in float32, always in the same order.
    Where `slots` there is not negative, it says which line of `sums`, in float32, to take in the
    place of dweight's. Width 0: D is known at launch.
    """
    lines, columns = (RUN_LINES, RUN_COLUMNS) if d.on_gpu else (1, CPU_COLUMNS)
    num_rows, num_sums = T.dynamic("num_rows"), T.dynamic("num_sums")
    vocabulary, width = T.dynamic("vocabulary"), width or T.dynamic("width")

    @T.prim_func
    def program(
        labels: T.Tensor((num_rows,), "int64"),
        order: T.Tensor((num_rows,), "int32"),
        ends: T.Tensor((num_rows,), "int32"),
        slots: T.Tensor((num_rows,), "int32"),
        hidden: T.Tensor((num_rows, width), dtype),
        label_slopes: T.Tensor((num_rows,), "float32"),
        sums: T.Tensor((num_sums, width), "float32"),
        dweight: T.Tensor((vocabulary, width), dtype),
    ):
        with d.grid(num_rows, T.ceildiv(width, columns)) as (begin, block):
            first = block * columns
            total = d.registers((lines, columns), "float32")
            added = d.registers((columns,), "float32")
            row = d.registers((lines,), "int32")
            slope = d.registers((lines,), "float32")
            if labels[begin] >= 0 and (begin == 0 or labels[T.max(begin - 1, 0)] < labels[begin]):
                T.fill(total, 0)
                for step in T.serial(T.ceildiv(ends[begin] - begin, lines)):
                    for i in d.each(lines):
                        place = begin + step * lines + i
                        row[i] = order[T.min(place, num_rows - 1)]
                        slope[i] = T.if_then_else(place < ends[begin], label_slopes[row[i]], 0.0)
                    for i, j in d.each(lines, columns):
                        if first + j < width:
                            total[i, j] = (
                                total[i, j]
                                + T.cast(hidden[row[i], first + j], "float32") * slope[i]
                            )
                T.reduce_sum(total, added, dim=0)
                for j in d.each(columns):
                    if first + j < width:
                        of_others = T.if_then_else(
                            slots[begin] >= 0,
                            sums[T.max(slots[begin], 0), first + j],
                            T.cast(dweight[labels[begin], first + j], "float32"),
                        )
                        dweight[labels[begin], first + j] = T.cast(of_others + added[j], dtype)

    return program


@dataclass(frozen=True)
class Runs:
    """Rows sorted by label: labels [M], the row that each was, the end of its run of equal labels.

    frequent [min(M, FREQUENT)]: the labels of the longest runs; slots [M]: where such a run begins
    the label's place in `frequent`, else -1.
    """

    labels: Tensor
    order: Tensor
    ends: Tensor
    slots: Tensor
    frequent: Tensor


def runs_of(labels: Tensor, vocabulary: int) -> Runs:
    """The runs, without waiting for the device."""
    in_order, order = labels.sort(stable=True)
    places = torch.arange(len(labels), device=labels.device)
    begins, ends = (torch.searchsorted(in_order, in_order, right=right) for right in (False, True))
    lengths = torch.where((begins == places) & (in_order >= 0), ends - places, 0)
    # No two are alike, so the choice is always the same. (topk takes three times as long.)
    longest = (lengths * len(labels) + places).argsort(descending=True)[:FREQUENT]
    slots = torch.full_like(places, -1)
    slots[longest] = places[: len(longest)]
    # What is no label, or a wrong one, must not be read.
    frequent = in_order[longest].clamp(0, vocabulary - 1)
    return Runs(in_order, *(x.to(torch.int32) for x in (order, ends, slots)), frequent)


def _widens(a: Tensor) -> bool:
    """Whether torch's product of 16-bit matrices can be float32, without copies in float32."""
    return a.is_cuda and a.dtype != torch.float32


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a b in float32."""
    if _widens(a):
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def add_wide_product(total: Tensor, a: Tensor, b: Tensor, alpha: float) -> None:
    """alpha a b is added to the total, in float32."""
    if _widens(a):
        torch.addmm(total, a, b, torch.float32, alpha=alpha, out=total)
    else:
        total.addmm_(a.float(), b.float(), alpha=alpha)


class WeightGradient:
    """dW [V, D], in the dtype of hidden [M, D], for labels [M]: every chunk, then the labels."""

    def __init__(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
        self.hidden, self.dtype = hidden, dtype_name("token_nll", hidden)
        self.dweight = torch.empty_like(weight)
        self.runs = runs_of(labels, len(weight))
        self.of_frequent = hidden.new_zeros(
            len(self.runs.frequent), hidden.shape[1], dtype=torch.float32
        )

    def add(self, rows: slice, exponentials: Tensor, shares: Tensor) -> None:
        """exponentials [rows, V] times the rows of hidden; their shares [rows] are float32."""
        part, alpha = self.hidden[rows], 1 / FLOAT16_SCALE
        if divides_late(self.dtype):
            part, alpha = torch.mul(part, shares[:, None], out=torch.empty_like(part)), 1.0
        torch.addmm(
            self.dweight, exponentials.T, part, beta=int(rows.start > 0), alpha=alpha,
            out=self.dweight,
        )  # fmt: skip
        chosen = exponentials.index_select(1, self.runs.frequent)
        add_wide_product(self.of_frequent, chosen.T, part, alpha)

    def add_labels(self, label_slopes: Tensor) -> Tensor:
        """dW with the rows of each label, times label_slopes [M] in float32."""
        d = dialect_of(self.hidden)
        parameters = (self.hidden.shape[1] if d.on_gpu else 0, self.dtype)
        launch(
            with_rows_of_labels, d, parameters, self.runs.labels, self.runs.order, self.runs.ends,
            self.runs.slots, self.hidden, label_slopes, self.of_frequent, self.dweight,
        )  # fmt: skip
        return self.dweight
