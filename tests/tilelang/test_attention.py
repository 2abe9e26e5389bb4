"""The TileLang attention: right for any documents and length, in the dtypes it states only."""

import pytest
import torch
from torch import Tensor

from candidates.tilelang.attention import attention
from reference import ops

B, N, K, H = 2, 4, 2, 16  # one static shape: each costs seconds to compile

DOCUMENTS = {
    "none": lambda tokens: None,
    "sorted": lambda tokens: torch.arange(tokens).mul(3).div(max(tokens, 1)).int().expand(B, -1),
    "coming back": lambda tokens: (torch.arange(tokens) // 5 % 2).expand(B, -1),
    "one token each": lambda tokens: torch.arange(tokens).flip(0).expand(B, -1),
}


def _inputs(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens)
    return tuple(
        torch.randn(B, tokens, heads, H, generator=generator).to(dtype) for heads in (N, K, K, N)
    )


def _gradients(role, inputs: tuple[Tensor, ...], documents: Tensor | None) -> tuple[Tensor, ...]:
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    o = role(*leaves, documents)
    return o.detach(), *torch.autograd.grad(o, leaves, inputs[3])


def _relative(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).norm() / want.norm().clamp_min(1e-30)).item()


@pytest.mark.parametrize("tokens", [1, 2, 3, 16, 17, 47])
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_output_and_gradients_are_those_of_the_reference(tokens, documents):
    inputs, ids = _inputs(tokens), DOCUMENTS[documents](tokens)
    got = _gradients(attention, inputs, ids)
    want = _gradients(ops.attention, tuple(x.double() for x in inputs), ids)
    scale = want[3].norm()  # of dq and dk too, which are zero where a query sees one key
    for x, y in zip(got, want, strict=True):
        assert (x.double() - y).norm() <= 1e-6 * max(scale, y.norm())


def test_float16_is_rounded_about_as_often_as_the_reference():
    inputs = _inputs(47, torch.float16)
    got, plain = (_gradients(role, inputs, None) for role in (attention, ops.attention))
    want = _gradients(ops.attention, tuple(x.double() for x in inputs), None)
    for x, y, z in zip(got, plain, want, strict=True):
        assert _relative(x, z) <= 3 * _relative(y, z)


def test_a_query_with_one_key_gives_its_value_and_no_gradient_to_the_scores():
    inputs = _inputs(47)
    o, dq, dk, _ = _gradients(attention, inputs, DOCUMENTS["one token each"](47))
    assert torch.equal(o, inputs[2].repeat_interleave(N // K, 2))
    assert dq.count_nonzero() == dk.count_nonzero() == 0


def test_the_largest_finite_values_of_another_document_have_no_influence():
    q, k, v, dout = _inputs(40)
    documents = (torch.arange(40) >= 20).int().expand(B, -1)
    huge_k, huge_v = k.clone(), v.clone()
    huge_k[:, :20], huge_v[:, :20] = 3e38, -3e38
    dout[:, :20] = 0
    want = _gradients(attention, (q, k, v, dout), documents)
    got = _gradients(attention, (q, huge_k, huge_v, dout), documents)
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x[:, 20:], y[:, 20:])


def test_strided_inputs_are_read_as_they_are_and_left_alone():
    q, k, v, dout = _inputs(33)
    want = _gradients(attention, (q, k, v, dout), None)
    strided = tuple(x.transpose(1, 3).contiguous().transpose(1, 3) for x in (q, k, v, dout))
    before = [x.clone() for x in strided]
    for x, y in zip(_gradients(attention, strided, None), want, strict=True):
        assert torch.equal(x, y)
    assert all(torch.equal(x, y) for x, y in zip(strided, before, strict=True))
    buffer = torch.randn(q.numel() + 1)  # a view that starts between two 16-byte boundaries
    shifted = buffer[1:].view(q.shape).copy_(q)
    assert torch.equal(_gradients(attention, (shifted, k, v, dout), None)[0], want[0])


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
def test_no_rows_and_no_tokens(shape):
    q, k = torch.randn(*shape, N, H), torch.randn(*shape, K, H)
    o, dq, dk, dv = _gradients(attention, (q, k, k, q), torch.zeros(shape, dtype=torch.int32))
    assert (o.shape, dq.shape, dk.shape, dv.shape) == (q.shape, q.shape, k.shape, k.shape)


def test_thirty_repeats_have_the_same_bits():
    inputs, ids = _inputs(47), DOCUMENTS["coming back"](47)
    want = _gradients(attention, inputs, ids)
    for _ in range(30):
        assert all(
            torch.equal(x, y) for x, y in zip(_gradients(attention, inputs, ids), want, strict=True)
        )


def test_operator_is_registered_as_torch_wants_it():
    q, k, v, _ = _inputs(18)
    ids = DOCUMENTS["sorted"](18)
    leaves = tuple(x.clone().requires_grad_() for x in (q, k, v))
    torch.library.opcheck(torch.ops.touchstone_tilelang.attention.default, (*leaves, ids))
    torch.library.opcheck(torch.ops.touchstone_tilelang.attention.default, (*leaves, None))


def test_every_call_is_counted():
    before = attention.kernel_calls()
    _gradients(attention, _inputs(17), None)
    after = attention.kernel_calls()
    assert after["attention_forward"] == before["attention_forward"] + 1
    assert after["attention_backward_keys"] == before["attention_backward_keys"] + 1


q, k, v, _ = _inputs(3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((q, k, v[:, :2], None), "q, k and v must be"),
        ((q, k[..., :8], v[..., :8], None), "q, k and v must be"),
        ((q[:, :, :3], k, v, None), "K must divide N"),
        ((q[..., :0], k[..., :0], v[..., :0], None), "width 1 to 256"),
        ((q, k.half(), v, None), "one dtype"),
        ((q.double(), k.double(), v.double(), None), "float32, float16 on cpu"),
        ((q.bfloat16(), k.bfloat16(), v.bfloat16(), None), "float32, float16 on cpu"),
        ((q, k, v, torch.zeros(B, 4, dtype=torch.int32)), "documents must be"),
        ((q, k, v, torch.zeros(B, 3)), "int32 or int64"),
    ],
)
def test_what_it_does_not_take_is_a_value_error_that_names_the_limit(arguments, message):
    with pytest.raises(ValueError, match=message):
        attention(*arguments)
