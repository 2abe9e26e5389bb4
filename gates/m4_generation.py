"""M4. Generation: the right position, the right distribution, and transformers' own tokens."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from gates import probes, toys, twins
from harness import gate
from reference.generate import GenerationSettings

GREEDY = GenerationSettings()
NUM_DRAWS = 600
SIGMAS = 5.0
NUM_GREEDY = 16


def generated(stack, model, prompt, num_tokens, settings=GREEDY):
    """The tokens as a list; what is no row of integers as the empty list."""
    tokens = stack.generate(model, torch.tensor(prompt), num_tokens, settings)
    return [int(token) for token in tokens]


def likeliest(model, tokens):
    """The likeliest token after `tokens` and its lead over the second, by one whole forward."""
    with torch.no_grad():
        hidden_1TD = model(torch.tensor([tokens], device=model.lm_head.weight.device))
        logits_V = hidden_1TD[0, -1].double() @ model.lm_head.weight.double().T
    first, second = logits_V.topk(2).values
    return int(logits_V.argmax()), float(first - second)


def check_leads(leads, dtype, check):
    """No likeliest token is likeliest by rounding alone: a tie would prove nothing."""
    least = 1e-9 if dtype == torch.float64 else 1e-4
    check("smallest lead of a likeliest token", min(leads), at_least=least, unit="nats",
          because="ten times what rounding moves the logits of two implementations")  # fmt: skip


@gate(
    claim="each greedy token is the likeliest one after all that stands before, and beyond "
    "max_positions after the last max_positions tokens, counted from 0",
    roles=["generate"],
    not_claimed="another rule beyond the context, such as a scaled rotation",
    source="pytorch/pytorch#103082: one query against a cache sees key 0 alone; a rule that is not "
    "stated is another one in every library",
)
@pytest.mark.parametrize("family", ["decoder", "chargpt"])
@pytest.mark.parametrize(("limit", "num_prompt"), [(64, 9), (16, 9), (16, 30)],
                         ids=["inside", "beyond", "prompt-beyond"])  # fmt: skip
def test_every_step(stack, family, limit, num_prompt, rng, device, check):
    model = probes.built(stack, family, device, rng, max_positions=limit)
    prompt = probes.random_ids(rng, num_prompt).tolist()
    got = generated(stack, model, prompt, 20)
    check("tokens", len(got), equal=20, because="as many as were asked for")
    want, leads = list(prompt), []
    for _ in range(20):
        token, lead = likeliest(model, want[-limit:])
        want.append(token)
        leads.append(lead)
    check_leads(leads, model.lm_head.weight.dtype, check)
    check("greedy tokens", got, equal=want[num_prompt:], because="the stated rule, step by step")


@gate(
    claim="greedy tokens are transformers' own, token for token",
    roles=["generate", "build_model"],
    not_claimed="sampled tokens: another generator draws others",
    source="transformers' generate(do_sample=False) with its key/value cache",
)
@pytest.mark.parametrize("kind", ["qwen2", "llama", "smollm2"])
def test_transformers(stack, kind, rng, device, check):
    transformers = twins.require_transformers()
    if kind == "smollm2":
        directory = twins.smollm2_folder()
        model = stack.load_pretrained(directory, stack, torch.float32, device)
        twin = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        twin = twin.to(device)
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        prompt = tokenizer("The sorted() function returns a new list, and").input_ids
    else:
        model = probes.built(stack, "decoder", device, rng, qkv_bias=kind == "qwen2")
        twin = twins.build(model.config, model.lm_head.weight.dtype, device)
        twin = twins.load(twin, model.state_dict())
        prompt = probes.random_ids(rng, 12).tolist()
    output = twin.eval().generate(
        torch.tensor([prompt], device=device), attention_mask=torch.ones(1, len(prompt)).to(device),
        do_sample=False, max_new_tokens=NUM_GREEDY, use_cache=True, eos_token_id=None,
        pad_token_id=0, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    leads = [float(-logits[0].double().topk(2).values.diff()) for logits in output.logits]
    check_leads(leads, model.lm_head.weight.dtype, check)
    want = output.sequences[0, len(prompt) :].tolist()
    check("greedy tokens", generated(stack, model, prompt, NUM_GREEDY), equal=want,
          because="the same weights and the same rule")  # fmt: skip


# --- models whose next token is known --------------------------------------------------------


def constant(stack, device, logits):
    """A model whose logits are these whatever it reads, and whose context is one token."""
    config = replace(probes.DECODER, vocabulary_size=len(logits), num_layers=1, max_positions=1,
                     tied_head=False)  # fmt: skip
    model = stack.build_model(config, stack).to(device, toys.working_dtype(stack))
    with torch.no_grad():
        nn.init.ones_(model.embed_tokens.weight)
        for layer in model.layers:
            nn.init.zeros_(layer.self_attn.o_proj.weight)
            nn.init.zeros_(layer.mlp.down_proj.weight)
        hidden_D = model(torch.zeros(1, 1, dtype=torch.int64, device=device))[0, 0]
        nn.init.zeros_(model.lm_head.weight)
        model.lm_head.weight[:, 0] = torch.tensor(logits).to(hidden_D) / hidden_D[0]
    return model


def by_formula(logits, temperature, kept):
    """exp(z / temperature) over the kept tokens, normalised."""
    weights = [math.exp(z / temperature) if i in kept else 0.0 for i, z in enumerate(logits)]
    return [weight / sum(weights) for weight in weights]


LOGITS = [0.5, 2.0, -1.0, 1.0, 2.5, 1.0, 0.0, 1.0]
EVERY = set(range(len(LOGITS)))


@gate(
    claim="a token is drawn with probability exp(z / temperature) among the top_k largest z, of "
    "which equal ones at the last place are taken from the lowest token on",
    roles=["generate"],
    not_claimed="which tokens a seed gives in another implementation",
    source="Fan et al. 2018 (top-k); karpathy/minGPT keeps every token that equals the k-th",
)
@pytest.mark.parametrize(
    ("temperature", "top_k", "kept"),
    [(1.0, None, EVERY), (0.5, None, EVERY), (2.0, None, EVERY), (1.0, 2, {1, 4}),
     (2.0, 3, {1, 3, 4}), (2.0, 4, {1, 3, 4, 5}), (1.0, 1, {4})],
    ids=["1", "0.5", "2", "1-top-2", "2-top-3-of-equals", "2-top-4-of-equals", "1-top-1"],
)  # fmt: skip
def test_distribution(stack, temperature, top_k, kept, rng, device, check):
    model = constant(stack, device, LOGITS)
    seed = int(torch.randint(2**31, (), generator=rng))
    settings = GenerationSettings(temperature, top_k, seed)
    tokens = generated(stack, model, [0], NUM_DRAWS, settings)
    outside = sum(token not in kept for token in tokens)
    check("tokens that were not kept", outside, equal=0, because="their probability is 0")
    for token, p in enumerate(by_formula(LOGITS, temperature, kept)):
        if 0 < p < 1:
            deviation = math.sqrt(NUM_DRAWS * p * (1 - p))
            distance = abs(tokens.count(token) - NUM_DRAWS * p) / deviation
            check("distance of a token's frequency", distance, at_most=SIGMAS, unit="deviations",
                  because="a right one is further off once in a million")  # fmt: skip


@gate(
    claim="of equal logits the lowest token is taken, at temperature 0 and with top_k 1",
    roles=["generate"],
    not_claimed="tokens that are equal only in exact arithmetic",
    source="a tie that nobody decides is decided by the device",
)
@pytest.mark.parametrize("settings", [GREEDY, GenerationSettings(1.0, 1)], ids=["greedy", "top-1"])
def test_ties(stack, settings, device, check):
    model = constant(stack, device, [0.0, 1.0, 3.0, 3.0, -1.0, 3.0])
    tokens = generated(stack, model, [5], 8, settings)
    check("tokens", tokens, equal=[2] * 8, because="tokens 2, 3 and 5 are equal")


@gate(
    claim="the seed, and nothing else, decides the draws; nothing of the model or the process is "
    "changed by generating",
    roles=["generate"],
    not_claimed="the same tokens from another implementation of the model",
    source="a draw from the global generator depends on all that ran before",
)
def test_seed(stack, device, check):
    model = constant(stack, device, LOGITS).train()
    settings = GenerationSettings(1.0, None, 7)
    before = torch.get_rng_state()
    first = generated(stack, model, [0], 40, settings)
    unchanged = torch.equal(torch.get_rng_state(), before)
    check("the global generator is as it was", unchanged, equal=True, because="others draw from it")
    torch.rand(1)
    again = generated(stack, model, [0], 40, settings)
    torch.set_rng_state(before)
    check("the same seed", again, equal=first, because="the seed decides")
    other = generated(stack, model, [0], 40, replace(settings, seed=8))
    check("another seed gives other tokens", other != first, equal=True, because="by chance once "
          "in 10^20")  # fmt: skip
    check("distinct tokens", len(set(first)), at_least=4, because="40 draws are not one draw")
    check("still in training mode", model.training, equal=True, because="training goes on")
    grown = [name for name, p in model.named_parameters() if p.grad is not None]
    check("parameters with a gradient", grown, equal=[], because="nothing was trained")


@gate(
    claim="the text ends with the first eos, which is part of it; without an eos it has the length "
    "that was asked for",
    roles=["generate"],
    not_claimed="several ends of a text",
    source="huggingface/trl#976: an end that is never predicted, and a generation that never stops",
)
def test_eos(stack, device, check):
    model = constant(stack, device, LOGITS)
    settings = GenerationSettings(1.0, None, 3)
    free = generated(stack, model, [0], 60, settings)
    eos = free[5]
    stopped = generated(stack, model, [eos, 0], 60, replace(settings, eos=eos))
    first = free.index(eos)
    check("tokens with an eos", stopped, equal=free[: first + 1],
          because="up to the first eos; the prompt's own ends nothing")  # fmt: skip
    check("tokens without an eos", len(free), equal=60, because="nothing ends it")
