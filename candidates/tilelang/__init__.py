"""The operators of a decoder in TileLang: the same programs on a CPU and on a Hopper GPU.

`--candidate tilelang` puts these roles on trial. Each is a torch operator with a fake kernel and
its own backward, and says by `kernel_calls` which TileLang kernels ran. DTYPES are those that every
role takes, by device.
"""

from candidates.tilelang import attention, linear, rms_norm, rope, swiglu, token_nll
from candidates.tilelang.dialect import DTYPES

__all__ = ["DTYPES", "ROLES"]

ROLES = {
    "rms_norm": rms_norm.rms_norm,
    "add_rms_norm": rms_norm.add_rms_norm,
    "rope": rope.rope,
    "attention": attention.attention,
    "swiglu": swiglu.swiglu,
    "linear": linear.linear,
    "token_nll": token_nll.token_nll,
}
