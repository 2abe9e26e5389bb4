"""How far loads run ahead of a loop changes when a tile arrives, and no bit of any result."""

import math

import pytest
import torch

from candidates.tilelang import attention, attention_backward, attention_kernels, matrix
from candidates.tilelang.dialect import NAMES, dialect_of

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: on a CPU the loops are serial"
)

B, T, N, K = 2, 333, 4, 2  # several tiles of 32, 64 and 128 tokens, the last one cut short
STAGES = (0, 1, 2, 3)
# Their buffers are written by hand, for a load and a product at the same time: two at least.
HOPPER_STAGES = (2, 3)


def _run(program, parameters, arguments, **options):
    """Launches the program, compiled for these options and never cached."""
    d = dialect_of(arguments[0])
    kernel = d.compile(program(d, *parameters, **options), **getattr(program, "options", {}))
    kernel(*arguments)


def _inputs(width, dtype):
    generator = torch.Generator().manual_seed(width)
    q, k, v, dout = (
        torch.randn(B, T, heads, width, generator=generator).to("cuda", dtype)
        for heads in (N, K, K, N)
    )
    documents = (torch.arange(T, device="cuda") // 101).int().expand(B, -1).contiguous()
    return q, k, v, dout, documents


def _attention(stages, programs, inputs):
    """o, L, dk, dv and dq with loads `stages` ahead; what is not written stays NaN."""
    forward, keys, queries, is_hopper = programs
    q, k, v, dout, documents = inputs
    parameters = attention._parameters(q, k, documents)
    documents, ranges = attention._ranges(q, documents)
    o, lse, dq = (x.fill_(math.nan) for x in (q.clone(), attention._rows(q), q.clone()))
    dk, dv, delta = (x.fill_(math.nan) for x in (k.clone(), v.clone(), lse.clone()))
    workers = (8,) if is_hopper else ()
    last = (delta,) if is_hopper else ()  # in the place of dq's sums, which nothing reads
    more = (*parameters, False) if is_hopper else parameters
    inputs = (q, k, v, documents, ranges)
    _run(forward, parameters, (*inputs, o, lse, *workers), stages=stages)
    size = (N, q.shape[3], NAMES[q.dtype], attention._tile(q))
    _run(attention_backward.attention_delta, size, (o, dout, delta))
    inputs = (*inputs, dout, lse, delta)
    _run(keys, more, (*inputs, *last, dk, dv), stages=stages)
    _run(queries, parameters, (*inputs, dq), stages=stages)
    return o, lse, dk, dv, dq


def _require_same_bits(results):
    for result in results:
        assert all(x.isfinite().all() for x in result)
        assert all(torch.equal(x, y) for x, y in zip(result, results[0], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_has_the_same_bits_at_0_to_3_stages(dtype):
    programs = (
        attention_kernels.attention_forward,
        attention_backward.attention_backward_keys,
        attention_backward.attention_backward_queries,
        False,
    )
    inputs = _inputs(32, dtype)
    _require_same_bits([_attention(stages, programs, inputs) for stages in STAGES])


def test_attention_for_hopper_has_the_same_bits_at_2_and_3_stages():
    inputs = _inputs(64, torch.bfloat16)
    if dialect_of(inputs[0]).arch != "sm_90a":
        pytest.skip("needs a Hopper GPU")
    programs = (
        attention.hopper_forward,
        attention.hopper_backward,
        attention.hopper_backward_queries,
        True,
    )
    _require_same_bits([_attention(stages, programs, inputs) for stages in HOPPER_STAGES])


def test_a_matrix_product_has_the_same_bits_at_0_to_4_stages(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    a, b = (
        torch.randn(*shape, generator=generator).to("cuda", torch.bfloat16)
        for shape in ((333, 456), (136, 456))
    )
    bias, results = a.new_zeros(136), []
    for stages in (*STAGES, matrix.STAGES):
        c = torch.full((333, 136), math.nan, dtype=a.dtype, device=a.device)
        monkeypatch.setattr(matrix, "STAGES", stages)
        parameters = ((0, 136, 456), (False, True), "bfloat16", True)
        _run(matrix.matrix_product, parameters, (a, b, bias, c))
        results.append((c,))
    _require_same_bits(results)
