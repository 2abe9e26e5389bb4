"""Token ids on disk: little-endian, as wide as the vocabulary needs."""

import numpy as np
import torch
from torch import Tensor


def id_dtype_name(vocabulary_size: int) -> str:
    """ "uint16" if every id below vocabulary_size fits into it, else "uint32".

    Raises ValueError for a vocabulary_size that no id or not every id fits into.
    """
    if not 1 <= vocabulary_size <= 2**32:
        raise ValueError(f"vocabulary_size {vocabulary_size} must be in 1..{2**32}")
    return "uint16" if vocabulary_size <= 2**16 else "uint32"


def write_ids(tokens: Tensor, vocabulary_size: int) -> bytes:
    """Token ids [n] of any integer type as they stand in a shard.

    Raises ValueError for the first id outside 0..vocabulary_size - 1: a wrong tokenizer must not
    come back as other tokens.
    """
    if tokens.ndim != 1 or tokens.is_floating_point():
        raise ValueError(f"ids must be [n] integers, got {tokens.dtype} {tuple(tokens.shape)}")
    wrong = (tokens < 0) | (tokens >= vocabulary_size)
    if bool(wrong.any()):
        place = int(wrong.nonzero()[0])
        raise ValueError(
            f"token {place} is {int(tokens[place])}; the vocabulary is 0..{vocabulary_size - 1}"
        )
    dtype = np.dtype(id_dtype_name(vocabulary_size)).newbyteorder("<")
    return tokens.numpy().astype(dtype).tobytes()


def read_ids(data: bytes, vocabulary_size: int) -> Tensor:
    """[n] int64: the inverse of write_ids.

    Raises ValueError for bytes that are no whole number of ids, and for an id that is not in the
    vocabulary.
    """
    dtype = np.dtype(id_dtype_name(vocabulary_size)).newbyteorder("<")
    if len(data) % dtype.itemsize:
        raise ValueError(f"{len(data)} bytes are no whole number of {dtype.itemsize}-byte ids")
    ids = torch.from_numpy(np.frombuffer(data, dtype).astype(np.int64))
    if len(ids) and int(ids.max()) >= vocabulary_size:
        raise ValueError(f"id {int(ids.max())} is not in the vocabulary 0..{vocabulary_size - 1}")
    return ids
