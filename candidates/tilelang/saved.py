"""Whether a backward may write over what its forward saved for it alone."""

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor

from candidates.tilelang.dialect import dense

HOLDERS = 3  # of memory that the graph alone holds: its tensor, what it hands out, and who counts


def may_write_over(saved: Tensor, cotangent: Tensor) -> bool:
    """Whether nobody else holds the memory of `saved` and no other backward will want it.

    torch asks the first for its CUDA graphs and the second for compiled backwards. What the count
    cannot show: a saved-tensor hook that keeps the tensor it was given, or hands out one tensor
    twice, sees it change. Traced and batched tensors are left as they are, since what a compiler
    reuses is up to it, and so is what is a part of something or not dense.
    """
    if type(saved) is not Tensor or is_batchedtensor(cotangent):
        return False
    storage, size = saved.untyped_storage(), saved.numel() * saved.element_size()
    if is_legacy_batchedtensor(cotangent) or dense(saved) is not saved or storage.nbytes() != size:
        return False
    kept = torch._C._autograd._get_current_graph_task_keep_graph()
    return torch._C._storage_Use_Count(storage._cdata) <= HOLDERS and not kept
