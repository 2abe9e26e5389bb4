"""Open weights that do not fit, let in; and more memory than the model takes."""

from __future__ import annotations

import torch

from gates import checkpoints
from gates.faults.weights import FIELDS, FILES, TENSORS, from_a_copy
from harness import fault

MEMORY = "m4_weights::test_memory"


@fault(role="load_pretrained", caught_by=FIELDS, seen_in="own")
def reads_only_the_fields_it_knows(reference):
    """What config.json asks for beyond the sizes is passed over: RoPE scaling, windows, biases."""
    neutral = checkpoints.published_fields(checkpoints.QWEN2)

    def change(directory, fields, tensors):
        fields.clear()
        fields.update(neutral)

    return from_a_copy(reference, change)


@fault(
    role="load_pretrained",
    caught_by=[f"{TENSORS}[{case}]" for case in ("no-norm", "no-bias", "unexpected", "two-tables")],
    seen_in="torch's load_state_dict(strict=False)",
)
def does_not_mind_other_names(reference):
    """What is missing stays as it was initialised, what is unexpected is passed over."""

    def change(directory, fields, tensors):
        config = checkpoints.QWEN2
        for name, shape in checkpoints.shapes(config).items():
            tensors.setdefault(name, torch.ones(shape))
        for name in tensors.keys() - checkpoints.shapes(config).keys():
            del tensors[name]

    return from_a_copy(reference, change)


@fault(
    role="load_pretrained",
    caught_by=[f"{TENSORS}[more-rows]", f"{TENSORS}[transposed]"],
    seen_in="transformers' ignore_mismatched_sizes",
)
def cuts_tensors_to_shape(reference):
    """A tensor of another shape is flattened and cut to the number of elements."""

    def change(directory, fields, tensors):
        for name, shape in checkpoints.shapes(checkpoints.QWEN2).items():
            if name in tensors and tensors[name].shape != shape:
                tensors[name] = tensors[name].flatten()[: shape.numel()].reshape(shape).clone()

    return from_a_copy(reference, change)


@fault(role="load_pretrained", caught_by=f"{TENSORS}[integers]", seen_in="own")
def casts_integers(reference):
    """Quantized integers are taken for weights."""

    def change(directory, fields, tensors):
        for name, tensor in tensors.items():
            tensors[name] = tensor.float()

    return from_a_copy(reference, change)


@fault(role="load_pretrained", caught_by=FILES, seen_in="own")
def skips_files_that_it_cannot_read(reference):
    """A damaged or absent shard is passed over, and its tensors keep their random start."""

    def load_pretrained(directory, stack, *options):
        try:
            return reference.load_pretrained(directory, stack, *options)
        except ValueError:
            return stack.build_model(checkpoints.QWEN2, stack)

    return load_pretrained


@fault(role="load_pretrained", caught_by=MEMORY, seen_in="own")
def reads_everything_first(reference):
    """The whole state is in memory before the model takes it over, or before it is refused."""

    def load_pretrained(directory, stack, *options):
        state = {name: tensor.clone() for name, tensor in checkpoints.read(directory).items()}
        model = reference.load_pretrained(directory, stack, *options)
        del state
        return model

    return load_pretrained


@fault(role="load_pretrained", caught_by=[f"{MEMORY}[whole]", f"{MEMORY}[sharded]"], seen_in="own")
def keeps_the_files_mapped(reference):
    """Each file stays open while its tensors are copied: pages that were read stay resident."""

    def load_pretrained(directory, stack, *options):
        mapped = checkpoints.read(directory)
        touched = sum(tensor.flatten()[:: 4096 // 8].sum() for tensor in mapped.values())
        model = reference.load_pretrained(directory, stack, *options)
        del mapped, touched
        return model

    return load_pretrained
