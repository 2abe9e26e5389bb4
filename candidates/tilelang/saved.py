"""Whether a backward may write over what its forward saved for it alone."""

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor

HOLDERS = 3  # of memory that the graph alone holds: its tensor, what it hands out, and who counts


def may_write_over(saved: Tensor, cotangent: Tensor) -> bool:
    """Whether nobody else holds the memory of `saved` and no other backward will want it.

    torch asks the first for its CUDA graphs and the second for compiled backwards. Whoever kept the
    tensor that a saved-tensor hook was given sees it change. Traced and batched tensors are left
    as they are: what a compiler reuses is up to it.
    """
    if (
        type(saved) is not Tensor
        or is_batchedtensor(cotangent)
        or is_legacy_batchedtensor(cotangent)
    ):
        return False
    num_holders = torch._C._storage_Use_Count(saved.untyped_storage()._cdata)
    kept = torch._C._autograd._get_current_graph_task_keep_graph()
    return num_holders <= HOLDERS and not kept
