"""The operators of `candidates.tilelang` that are the fastest known, for training.

    --candidate tilelang.fast

`linear` is left to torch, whose cuBLAS was ahead of TileLang in every product measured but one
(LOG.md), as are the products of `projections`, of `gated_linear` and of the gradients inside
`token_nll`.
"""

from candidates.tilelang import DTYPES
from candidates.tilelang import ROLES as ALL
from candidates.tilelang.gated_linear import gated_linear
from candidates.tilelang.projections import projections

__all__ = ["DTYPES", "ROLES"]

ROLES = {name: role for name, role in ALL.items() if name != "linear"}
ROLES |= {"projections": projections, "gated_linear": gated_linear}
