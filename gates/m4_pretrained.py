"""M4. SmolLM2's real weights on real text: the numbers of transformers, in and after training."""

from __future__ import annotations

import functools
import gc
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from gates import outcomes, parity, toys, twins
from gates.m4_parity_forward import OPERATORS
from gates.m4_parity_training import (
    NUM_UPDATES,
    ROLES,
    check_close,
    updates_of_stack,
    updates_of_twin,
)
from harness import gate
from reference.data.corpus import python_topics
from reference.hf.shards import WHOLE
from reference.schedule import Schedule
from reference.update import UpdateSettings

# (rows, tokens a row, layout)
TEXTS = {
    "packed": (2, 128, "packed"),
    "row-of-512": (1, 512, "rows"),
    "padded": (2, 64, "padded"),
    "short": (2, 24, "padded"),  # bfloat16 takes ten times as long as float32 on many a CPU
}
GROUP = 16  # targets whose loss is taken together
SETTINGS = UpdateSettings(Schedule(peak=2e-5, total_tokens=2**40), max_norm=0.5)
SOURCE = "transformers' AutoModelForCausalLM; SmolLM2-135M-Instruct; the Python documentation"


def loaded(stack, device, compute_dtype=None):
    gc.collect()  # a model is in a cycle with its hooks: the one before is freed now
    return stack.load_pretrained(
        twins.smollm2_folder(), stack, torch.float32, device, compute_dtype
    )


@functools.cache
def text(num_rows, num_tokens, layout):
    """The first tokens of long chapters of the language reference."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(twins.smollm2_folder() / "tokenizer.json"))
    chapters = (topic.data.decode() for topic in python_topics() if len(topic.data) > 8000)
    ids = [tokenizer.encode(next(chapters)).ids[:num_tokens] for _ in range(num_rows)]
    return twins.batch(torch.tensor(ids), layout)


def outcome_of(stack, model, batch, device, gradients=False):
    return outcomes.of_stack(stack, model, batch, gradients=gradients, group=GROUP,
                           kept_on=outcomes.place(device))  # fmt: skip


def twin(dtype, device):
    gc.collect()
    # Its eager softmax is float32 whatever the dtype; with float64's masks that is NaN.
    attention = "sdpa" if dtype == torch.float64 else "eager"
    return twins.require_transformers().AutoModelForCausalLM.from_pretrained(
        twins.smollm2_folder(), dtype=dtype, attn_implementation=attention, local_files_only=True
    ).to(device)  # fmt: skip


# What transformers says does not depend on what is on trial: it is kept between the variants of a
# gate, but only the last two results, since the gradients of one pass take 0.5 GB.


@functools.lru_cache(maxsize=2)
def outcome_of_twin(name, dtype, device, gradients=False):
    batch = text(*TEXTS[name]).to(device)
    return outcomes.of_twin(twin(dtype, device), batch, gradients=gradients, group=GROUP,
                          kept_on=outcomes.place(device))  # fmt: skip


@functools.lru_cache(maxsize=1)
def gradients_of_twin(device):
    """Its outcomes in float64, on the CPU where the device lacks that, and in float32, settled.

    Its norms and rotary tables are float32 in any dtype: 6e-7 of a gradient, one fifth of what
    float32 everywhere makes on a CPU.
    """
    kept_on = outcomes.place(device)

    def outcome(dtype, where):
        model, batch = twin(dtype, where), text(*TEXTS["padded"]).to(where)
        for parameter in model.parameters():
            parameter.grad_dtype = torch.float32  # half the memory, and an error of 3e-8
        return outcomes.of_twin(model, batch, gradients=True, group=GROUP, kept_on=kept_on)

    exact = outcome(torch.float64, kept_on)
    return exact, parity.settled(outcome(torch.float32, device), exact)


@functools.lru_cache(maxsize=1)
def trained_twin(device):
    outcome_of_twin.cache_clear()  # their gradients, which no gate after this asks for
    gradients_of_twin.cache_clear()
    gc.collect()
    found = updates_of_twin(twin(torch.float32, device), windows(device), SETTINGS)
    gc.collect()  # the moments, which are in a cycle with their optimizer
    return replace(found, parameters=OnDisk.of(found.parameters))


class OnDisk(Mapping):
    """The tensors of a safetensors file, read when they are asked for and not kept in memory.

    With what AdamW holds, two workers that kept them would not fit into 6 GiB.
    """

    def __init__(self, file, prefix="", folder=None):
        self.file, self.prefix, self.folder = file, prefix, folder  # which goes when this does
        with safe_open(file, framework="pt") as opened:
            self.names = [name.removeprefix(prefix) for name in opened.keys()]  # noqa: SIM118

    @classmethod
    def of(cls, tensors):
        folder = tempfile.TemporaryDirectory()
        file = Path(folder.name) / "parameters.safetensors"
        save_file(dict(tensors), file)
        return cls(file, folder=folder)

    def __getitem__(self, name):
        with safe_open(self.file, framework="pt") as opened:
            return opened.get_tensor(f"{self.prefix}{name}").clone()  # the mapping ends here

    def __iter__(self):
        return iter(self.names)

    def __len__(self):
        return len(self.names)


def windows(device):
    """Five different windows of two rows."""
    return [
        [twins.batch(ids_BT.contiguous(), "padded").to(device)]
        for ids_BT in text(*TEXTS["packed"]).microbatch.input_ids.split(25, dim=1)[:NUM_UPDATES]
    ]


@gate(
    claim="with SmolLM2's weights, hidden states of every layer, logits and loss over real text "
    "are those of transformers, to 1e-5; the hidden state of any single token to 3e-5",
    roles=["load_pretrained", "build_model", *OPERATORS],
    not_claimed="the quality of the weights, which were 4-bit numbers",
    source=SOURCE,
)
@pytest.mark.parametrize("name", ["packed", "row-of-512"])
def test_values(stack, name, device, check):
    want = outcome_of_twin(name, torch.float32, device)
    model = loaded(stack, device)
    batch = text(*TEXTS[name]).to(device)
    got = outcome_of(stack, model, batch, device)
    parity.check_close(check, got, want, at_most=1e-5, worst_at_most=3e-5,
                       because="float32 on both sides; behind the third layer one token of either "
                       "is 1.4e-5 from float64, all together 1e-6")  # fmt: skip


@gate(
    claim="with SmolLM2's weights, in float32, the error of the gradient of every matrix against "
    "transformers in float64 is at most 3.4 times that of transformers in float32, and so are "
    "those of all vectors together; the whole gradient's is at most twice, any vector's 10 times",
    roles=["load_pretrained", "build_model", *OPERATORS],
    not_claimed="an error of 1e-5: transformers' own are up to 3e-5 on a CPU and 9e-4 on an H200. "
    "The sum over the vocabulary in dhidden makes such errors; linear layers in float64 change "
    "nothing",
    source=f"{SOURCE}, with the loss of its logits in float64",
)
def test_gradients(stack, device, check):
    exact, plain = gradients_of_twin(device)
    model = loaded(stack, device)
    batch = text(*TEXTS["padded"]).to(device)
    got = parity.settled(outcome_of(stack, model, batch, device, gradients=True), exact)
    # Sums term by term, as TileLang's on a CPU, have 1.3 times its error, 2.4 in the worst matrix.
    parity.check_gradient_ratios(check, got, plain, exact, k=2.5, whose="transformers")
    for name, error in got.errors.items():
        check("error ratio of a gradient, worst", error / plain.errors[name], at_most=10,
              because=f"a few elements scatter: 5 for TileLang on a CPU; {name}")  # fmt: skip
    mine, theirs = (whole(outcome.errors, exact) for outcome in (got, plain))
    check("error ratio of the whole gradient", mine / theirs, at_most=2,
          because="no way of adding up is that much worse")  # fmt: skip


def whole(errors, want):
    """The error of all gradients together, relative to their 2-norm."""
    sizes = torch.tensor([float(want.gradients[name].norm()) for name in errors]).double()
    parts = torch.tensor(list(errors.values())).double() * sizes
    return float(parts.norm() / sizes.norm())


@gate(
    claim="with SmolLM2's weights, in bfloat16, the errors of hidden states, logits, losses and of "
    "every gradient are at most 1.5 (gradients 2) times those of transformers in bfloat16",
    roles=["load_pretrained", "build_model", *OPERATORS],
    not_claimed="that bfloat16 is precise enough to train with",
    source=f"{SOURCE}, in float32: 1000 times as precise as what is compared",
)
def test_bfloat16(stack, device, check):
    narrow = toys.require_bfloat16(stack)
    gradients_of_twin.cache_clear()  # two workers would not fit into 6 GiB with them
    oracle, plain = (
        outcome_of_twin("short", dtype, device, gradients=True)
        for dtype in (torch.float32, torch.bfloat16)
    )
    model = loaded(stack, device, narrow)
    batch = text(*TEXTS["short"]).to(device)
    got = outcome_of(stack, model, batch, device, gradients=True)
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
    got = updates_of_stack(stack, model, windows(device), SETTINGS)
    check_close(check, got, want, OnDisk(twins.smollm2_folder() / WHOLE, "model."))


@gate(
    claim="in bfloat16 each norm of SmolLM2 multiplies by its gain before its one rounding",
    roles=["load_pretrained", "rms_norm", "add_rms_norm"],
    not_claimed="that transformers does so: its Llama rounds before the gain as well",
    source="google/gemma_pytorch PR#67, vllm-project/vllm PR#3653; gains as they were learned",
)
def test_norms(stack, device, check):
    calls = []
    recorder = outcomes.recording_norms(stack, calls)
    model = loaded(recorder, device, toys.require_bfloat16(stack))
    with torch.no_grad():
        model(text(*TEXTS["padded"]).to(device).microbatch.input_ids)
    parity.check_norms(check, calls, num_norms=2 * len(model.layers) + 1)
