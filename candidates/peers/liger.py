"""Liger's Triton kernels as roles, so that other people's code stands before the same gates.

    pytest -m M4 --candidate peers.liger --device cuda

Norms are asked for the order of the contract (gain before the one rounding, "gemma") and not to
write into the incoming gradient. Written for liger-kernel 0.8.5; the package runs on a GPU alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

NO_TARGET = -100
DTYPES = {"cuda": (torch.float32, torch.bfloat16, torch.float16)}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """LigerRMSNormFunction."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    _require_gpu(x)
    y: Tensor = LigerRMSNormFunction.apply(x, weight, eps, 0.0, "gemma", False)
    return y


def rope(
    q_BTNH: Tensor, k_BTKH: Tensor, positions_BT: Tensor, theta: float
) -> tuple[Tensor, Tensor]:
    """LigerRopeFunction with tables of cosines and sines in float32, made here."""
    from liger_kernel.ops.rope import LigerRopeFunction

    _require_gpu(q_BTNH)
    width = q_BTNH.shape[-1]
    exponent = torch.arange(0, width, 2, device=q_BTNH.device, dtype=torch.float32) / width
    angles_BTh = positions_BT[..., None].float() * theta**-exponent
    angles_BTH = torch.cat((angles_BTh, angles_BTh), dim=-1)
    q, k = LigerRopeFunction.apply(
        q_BTNH.transpose(1, 2), k_BTKH.transpose(1, 2), angles_BTH.cos(), angles_BTH.sin()
    )
    return q.transpose(1, 2), k.transpose(1, 2)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """LigerSiLUMulFunction."""
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    _require_gpu(gate)
    h: Tensor = LigerSiLUMulFunction.apply(gate, up)
    return h


def token_nll(hidden_MD: Tensor, weight_VD: Tensor, labels_M: Tensor) -> tuple[Tensor, Tensor]:
    """LigerFusedLinearCrossEntropyFunction, summed."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    _require_gpu(hidden_MD)
    result = LigerFusedLinearCrossEntropyFunction.apply(
        hidden_MD, weight_VD.to(hidden_MD.dtype), labels_M, None, None, NO_TARGET, 0.0, 0.0, "sum"
    )
    nll_sum = result[0] if isinstance(result, tuple) else result
    return nll_sum, (labels_M != NO_TARGET).sum()


def _require_gpu(x: Tensor) -> None:
    if x.device.type != "cuda":
        raise ValueError(f"Liger's kernels run on a GPU, got a tensor on {x.device}")


ROLES = {"rms_norm": rms_norm, "rope": rope, "swiglu": swiglu, "token_nll": token_nll}
