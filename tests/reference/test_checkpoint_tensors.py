"""What is streamed is a safetensors file, and comes back bit for bit."""

import io

import pytest
import torch
from safetensors.torch import load
from safetensors.torch import save as library_save

from reference.checkpoint.errors import CheckpointError
from reference.checkpoint.tensors import DTYPES, PIECE_BYTES, layout_of, read_tensors, stream


def tensors():
    generator = torch.Generator().manual_seed(0)
    found = {
        f"a.{name}": torch.randint(2, (3, 5), generator=generator).to(dtype)
        for name, dtype in DTYPES.items()
    }
    return found | {
        "scalar": torch.tensor(7, dtype=torch.int64),
        "empty": torch.empty(0, 4),
        "transposed": torch.randn(4, 3, generator=generator).T,
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        "long": torch.randn(600_000, generator=generator),
        "ü": torch.ones(1),
    }


def same(one, other):
    return one.dtype == other.dtype and torch.equal(
        one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
    )


def read(data, want):
    layouts = {name: layout_of(tensor) for name, tensor in want.items()}
    return dict(read_tensors(io.BytesIO(data), "x", layouts, layouts))


def test_the_library_reads_what_is_streamed():
    got = load(b"".join(stream(tensors())))
    assert got.keys() == tensors().keys()
    assert all(same(got[name], tensor) for name, tensor in tensors().items())


def test_what_the_library_wrote_is_read():
    data = library_save({name: tensor.contiguous() for name, tensor in tensors().items()})
    got = read(data, tensors())
    assert all(same(got[name], tensor) for name, tensor in tensors().items())


@pytest.mark.parametrize("first_bytes", [b"\x80", b"\x50\x4b"])
def test_a_header_whose_length_begins_as_a_pickle_does_is_read(first_bytes):
    """Of 32 files one has such a length: it was refused as a pickle."""
    wanted = int.from_bytes(first_bytes, "little")
    for length in range(1, wanted + 256):
        want = {"x" * length: torch.arange(3)}
        data = b"".join(stream(want))
        if data.startswith(first_bytes):
            break
    assert data.startswith(first_bytes)
    assert same(*read(data, want).values(), *want.values())


def test_pieces_are_small():
    large = {"x": torch.zeros(PIECE_BYTES + 1, dtype=torch.uint8)}
    assert [len(piece) for piece in stream(large)][1:] == [PIECE_BYTES, 1]


def test_a_dtype_that_is_not_stored_is_refused():
    with pytest.raises(ValueError, match=r"tensors of torch\.complex64 are not stored"):
        list(stream({"x": torch.zeros(1, dtype=torch.complex64)}))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "no safetensors file"),
        (b"\x80\x04" + b"x" * 30, "is a pickle"),
        (b"PK\x03\x04" + b"x" * 30, "is a pickle"),
        ((2**62).to_bytes(8, "little") + b"{}", "header is said to be"),
        ((2).to_bytes(8, "little") + b"[]", "must hold a JSON object"),
        ((2).to_bytes(8, "little") + b"{}", "only in state.json x"),
        ((100_000).to_bytes(8, "little") + b"[" * 100_000, "RecursionError"),
    ],
)
def test_a_lying_file_is_refused(data, says):
    with pytest.raises(CheckpointError, match=says):
        read(data, {"x": torch.zeros(2)})


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ('{"x":{"dtype":"F32","shape":[2],"data_offsets":[4,8]}}', "x has the place"),
        ('{"x":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}', "a gap or an overlap"),
        ('{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8.0]}}', "x has no place"),
        (
            '{"x":{"dtype":"F64","shape":[1],"data_offsets":[0,8]}}',
            r"F64 \[1\], state\.json says F32 \[2\]",
        ),
        ('{"x":7}', "x has no place, but 7"),
    ],
)
def test_a_lying_header_is_refused(header, says):
    data = len(header).to_bytes(8, "little") + header.encode() + b"\0" * 8
    with pytest.raises(CheckpointError, match=says):
        read(data, {"x": torch.zeros(2)})


def test_bytes_after_the_values_are_refused():
    with pytest.raises(CheckpointError, match="its header says otherwise"):
        read(b"".join(stream({"x": torch.zeros(2)})) + b"\0", {"x": torch.zeros(2)})
