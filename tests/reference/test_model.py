"""The models: Hugging Face's Qwen2 agrees, a tie stays a tie, 16 bits leave float32 parameters."""

import copy
import io
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from reference.config import CharGPTConfig, DecoderConfig, preset
from reference.model import build_model
from reference.stack import ROLES

STACK = SimpleNamespace(**ROLES)
DECODER = DecoderConfig(
    vocabulary_size=31,
    model_width=16,
    feed_forward_width=24,
    num_layers=2,
    num_query_heads=4,
    num_kv_heads=2,
    head_width=6,
    max_positions=32,
    rope_theta=700.0,
    qkv_bias=True,
)
CHARGPT = CharGPTConfig(
    vocabulary_size=31, model_width=16, num_layers=2, num_heads=4, max_positions=32
)
FAMILIES = pytest.mark.parametrize("config", [DECODER, CHARGPT], ids=["decoder", "chargpt"])


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def randomized(config):
    """A model in float64 of which no parameter has a special value."""
    model = build_model(config, STACK).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_the_decoder_agrees_with_transformers(tied):
    transformers = pytest.importorskip("transformers")
    config = replace(DECODER, tied_head=tied, head_width=4)  # there a head is width / heads
    theirs = transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(
            vocab_size=31,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            rope_parameters={"rope_type": "default", "rope_theta": 700.0},
            tie_word_embeddings=tied,
            attn_implementation="eager",
        )
    ).double()
    ours = randomized(config)
    theirs.load_state_dict(
        {n if n.startswith("lm_head") else f"model.{n}": t for n, t in ours.state_dict().items()}
    )
    input_ids_BT = torch.randint(31, (2, 20))
    got = ours(input_ids_BT) @ ours.lm_head.weight.T
    # Their angles are float32 whatever the model's dtype.
    torch.testing.assert_close(got, theirs(input_ids_BT).logits, rtol=0, atol=1e-5)


def test_the_chargpt_agrees_with_torch_layers():
    model = randomized(CHARGPT)
    input_ids_BT = torch.randint(31, (2, 9))
    x_BTD = model.embed_tokens.weight[input_ids_BT] + model.embed_positions.weight[:9]
    mask_TT = torch.nn.Transformer.generate_square_subsequent_mask(9, dtype=torch.float64)
    for layer in model.layers:
        theirs = torch.nn.TransformerEncoderLayer(
            16, 4, 64, 0.0, "gelu", 1e-5, batch_first=True, norm_first=True, dtype=torch.float64
        )
        attention = layer.self_attn
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        theirs.self_attn.in_proj_weight.data = torch.cat([p.weight for p in projections])
        theirs.self_attn.in_proj_bias.data = torch.cat([p.bias for p in projections])
        pairs = [
            (theirs.self_attn.out_proj, attention.o_proj),
            (theirs.linear1, layer.up_proj),
            (theirs.linear2, layer.down_proj),
            (theirs.norm1, layer.input_layernorm),
            (theirs.norm2, layer.post_attention_layernorm),
        ]
        for module, source in pairs:
            module.load_state_dict(source.state_dict())
        x_BTD = theirs(x_BTD, mask_TT, is_causal=True)
    want = torch.nn.functional.layer_norm(x_BTD, (16,), model.norm.weight, model.norm.bias)
    torch.testing.assert_close(model(input_ids_BT), want)


def test_parameter_names_are_those_of_qwen2():
    names = {name for name, _ in build_model(DECODER, STACK).named_parameters()}
    layer = {name for name in names if name.startswith("layers.0.")}
    assert layer == {
        "layers.0.self_attn.q_proj.weight",
        "layers.0.self_attn.q_proj.bias",
        "layers.0.self_attn.k_proj.weight",
        "layers.0.self_attn.k_proj.bias",
        "layers.0.self_attn.v_proj.weight",
        "layers.0.self_attn.v_proj.bias",
        "layers.0.self_attn.o_proj.weight",
        "layers.0.mlp.gate_proj.weight",
        "layers.0.mlp.up_proj.weight",
        "layers.0.mlp.down_proj.weight",
        "layers.0.input_layernorm.weight",
        "layers.0.post_attention_layernorm.weight",
    }
    assert {name for name in names if "layers" not in name} == {
        "embed_tokens.weight",
        "norm.weight",
    }


@FAMILIES
def test_the_stack_s_own_roles_are_called(config):
    called = []

    def attention(q, k, v, documents):
        called.append(documents)
        return STACK.attention(q, k, v, documents)

    stack = SimpleNamespace(**{**ROLES, "attention": attention})
    build_model(config, stack)(torch.zeros(1, 3, dtype=torch.int64))
    assert called == [None, None]


def built_on_meta(config):
    with torch.device("meta"):
        model = build_model(config, STACK)
    return model.to_empty(device="cpu")


def loaded_by_assignment(config):
    with torch.device("meta"):
        model = build_model(config, STACK)
    state = {name: t.clone() for name, t in build_model(config, STACK).state_dict().items()}
    model.load_state_dict(state, assign=True)
    return model


def loaded_without_a_head(config):
    state = build_model(config, STACK).state_dict()
    del state["lm_head.weight"]
    model = build_model(config, STACK)
    model.load_state_dict(state, assign=True, strict=False)
    return model


def unpickled(config):
    file = io.BytesIO()
    torch.save(build_model(config, STACK), file)
    file.seek(0)
    return torch.load(file, weights_only=False)


CONSTRUCTIONS = {
    "directly": lambda config: build_model(config, STACK),
    "on meta": built_on_meta,
    "deepcopy": lambda config: copy.deepcopy(build_model(config, STACK)),
    "to float64": lambda config: build_model(config, STACK).to(torch.float64),
    "share_memory": lambda config: build_model(config, STACK).share_memory(),
    "load by assignment": loaded_by_assignment,
    "load without a head": loaded_without_a_head,
    "unpickled": unpickled,
}


@pytest.mark.parametrize("how", CONSTRUCTIONS)
def test_a_tie_stays_a_tie(how):
    construct = CONSTRUCTIONS[how]
    model = construct(DECODER)
    assert model.lm_head.weight is model.embed_tokens.weight
    untied = construct(replace(DECODER, tied_head=False))
    assert untied.lm_head.weight is not untied.embed_tokens.weight


def test_a_tied_model_refuses_a_state_with_two_tables():
    state = build_model(replace(DECODER, tied_head=False), STACK).state_dict()
    with pytest.raises(ValueError, match="tied_head is True, but"):
        build_model(DECODER, STACK).load_state_dict(state)


@FAMILIES
def test_reset_after_meta_draws_what_construction_draws(config):
    with torch.device("meta"):
        model = build_model(config, STACK)
    model = model.to_empty(device="cpu")
    torch.manual_seed(1)
    model.reset_parameters()
    torch.manual_seed(1)
    want = build_model(config, STACK)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, want.state_dict()[name]), name


@FAMILIES
def test_16_bit_compute_leaves_float32_parameters_and_gradients(config):
    model = build_model(replace(config, compute_dtype=torch.bfloat16), STACK)
    hidden_BTD = model(torch.randint(31, (2, 8)))
    hidden_BTD.float().square().sum().backward()
    assert hidden_BTD.dtype == torch.bfloat16
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    used = [p for name, p in model.named_parameters() if name != "lm_head.weight"]
    assert {p.grad.dtype for p in used} == {torch.float32}


@FAMILIES
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(3).long(),), r"input_ids must be \[B, T\]"),
        ((torch.zeros(1, 33).long(),), "max_positions 32 does not cover a row of 33"),
        ((torch.zeros(1, 3).long(), torch.zeros(3, 1, 3).long()), "positions must be"),
        ((torch.zeros(1, 3).long(), torch.arange(3)), "positions must be"),
        ((torch.zeros(1, 3).long(), torch.tensor([[30, 31, 32]])), "in .0, 32. .* got 30 to 32"),
        ((torch.zeros(1, 3).long(), torch.tensor([[0, 1, -1]])), "got -1 to 1"),
        ((torch.zeros(1, 3).long(), None, torch.zeros(1, 4).int()), "documents must be"),
    ],
)
def test_input_that_does_not_fit_is_refused(config, arguments, message):
    with pytest.raises(ValueError, match=message):
        build_model(config, STACK)(*arguments)


def test_a_config_of_no_family_is_refused():
    with pytest.raises(ValueError, match="must be a DecoderConfig or a CharGPTConfig"):
        build_model(SimpleNamespace(vocabulary_size=3), STACK)


def test_a_preset_runs_at_its_full_length():
    config = preset("chargpt-smoke")
    hidden_BTD = build_model(config, STACK)(torch.zeros(1, 32, dtype=torch.int64))
    assert hidden_BTD.shape == (1, 32, 48)
