"""What wrong kernels have in common: dense reads, tiles without bounds, writes beyond the end."""

from __future__ import annotations

import torch


def wide(x):
    """x in float32, float64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def matrix_product(a, b):
    """a b in float32, rounded once."""
    return (wide(a) @ wide(b)).to(a.dtype)


def rounded_products(a, b):
    """a b whose products are rounded to the operands' dtype before they are added in float32."""
    return wide(a[:, :, None] * b[None]).sum(1).to(a.dtype)


def narrow_sum(a, b):
    """a b, the sum kept in the dtype of the operands between tiles of 8 inner elements."""
    total = torch.zeros(len(a), b.shape[1], dtype=a.dtype, device=a.device)
    for k in range(0, a.shape[1], 8):
        total += matrix_product(a[:, k : k + 8], b[k : k + 8])
    return total


def memory_of(x):
    """The whole storage of x as one row."""
    storage = x.untyped_storage()
    num_elements = storage.nbytes() // x.element_size()
    return x.detach().as_strided((num_elements,), (1,), 0)


def densely(x):
    """What a kernel sees that takes x for contiguous from where it begins."""
    memory = memory_of(x)
    places = (x.storage_offset() + torch.arange(x.numel(), device=x.device)) % len(memory)
    return memory[places].view(x.shape)


def padded_tile(x, rows):
    """[..., D] as [M', D] with M' a multiple of `rows`: memory behind the last row is read too."""
    flat = x.reshape(-1, x.shape[-1])
    missing = -len(flat) % rows
    if not missing:
        return flat
    memory = memory_of(x)
    behind = x.storage_offset() + x.numel() + torch.arange(missing * x.shape[-1], device=x.device)
    return torch.cat((flat, memory[behind % len(memory)].view(missing, -1)))


def warp_garbage(x, lanes=32):
    """[..., D] with D rounded up to whole warps; the lanes beyond hold the row's first values."""
    missing = -x.shape[-1] % lanes
    return torch.cat((x, x[..., :missing].expand(*x.shape[:-1], -1)), dim=-1) if missing else x


def writes_beyond(y):
    """y in memory from torch.empty, whose next element is overwritten where there is one."""
    out = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    out.copy_(y)
    memory, end = memory_of(out), out.storage_offset() + out.numel()
    if end < len(memory):
        memory[end] = 0.0
    return out


def cut_tail(x, multiple):
    """x with the elements after the last whole `multiple` of all elements set to zero."""
    flat = x.flatten().clone()
    flat[flat.numel() // multiple * multiple :] = 0
    return flat.view(x.shape)
