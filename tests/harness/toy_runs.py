"""Runs as large as real ones that nobody ran, one of each verdict, to look at.

``PYTHONPATH=. python tests/harness/toy_runs.py DIR`` writes and renders them into DIR.
"""

import math
import random
import sys
from pathlib import Path

from toy_evidence import LINEAR, measurement, not_run, record, run_line, variant, write

from harness.report import render

GATES = """
m0_ledger parameter_formula|the parameter formula counts every element of the instantiated model|parameter_count|qwen2.5-0.5b qwen2.5-1.5b qwen2.5-3b qwen2.5-7b plan-1.15b bytes-0.09m
m0_ledger flops_formula|the FLOPs formula equals the matrix products of a traced model, exactly|training_flops|tied-gqa untied-mha
m0_ledger memory|memory by part under ZeRO 1, 2 and 3 adds up to the whole|training_memory|1 2 3
m0_ledger training_time|time follows from tokens, FLOPs per token and the stated utilisation|training_time|
m0_evaluation perplexity_and_bits_per_byte|perplexity and bits per byte are taken over summed nats, never over means|evaluate|
m1_labels next_token|every label is the next token inside the document, or no target|make_labels|inside across
m1_labels one_hot_oracle|logits that are one-hot on token t+1 have loss zero|make_labels token_nll|
m1_causality later_tokens|no gradient reaches a position from a later token, in any layer|attention build_model|train eval
m1_documents isolation|documents in one row do not see each other, and each equals itself alone|attention rope build_model|2 3 7
m1_positions relative|scores depend on the distance of two positions only|rope|64 1024
m1_initialization near_uniform|the loss before training is near ln V|build_model|bytes-0.09m chargpt-smoke
m1_tied same_storage|head and embedding are one tensor after every way to build the model|build_model|init deepcopy meta load
m1_one_step finite|one step leaves every parameter finite, and moves each|update_window|
m2_accumulation partition|k microbatches leave the gradient of the window's token mean|accumulate|1 2 4 8
m2_accumulation zero_targets|a window without a target changes nothing and is recorded|accumulate update_window|
m2_clip once_after_accumulation|the whole gradient is clipped once, after accumulation|clip_grad_norm update_window|
m2_schedule table|learning rate is a pure function of supervised tokens|learning_rate|warmup stable decay
m2_optimizer against_torch|updates equal AdamW's over gaps in the gradient|optimizer_step param_groups|float64 float32
m2_precision master_weights|bfloat16 training moves float32 weights by less than a bfloat16 step|build_model optimizer_step|
m2_descent loss_falls|the last ten of 100 updates have a lower loss than the first ten|train|language library
m2_overfit one_batch|one batch can be learned by heart|train|
""".strip().splitlines()  # noqa: E501

FAULTS = """
accumulate|mean_of_microbatch_means|Divides each microbatch by its own count.|huggingface/transformers PR#34191|m2_accumulation::test_partition
accumulate|divided_by_microbatches|Divides by the number of microbatches as well as by the tokens.|karpathy/nanoGPT#168|m2_accumulation::test_partition
accumulate|drops_last_microbatch|Leaves out the last microbatch when the counts do not divide.|ml-explore/mlx-lm PR#1413|m2_accumulation::test_partition
accumulate|nan_on_no_target|Divides by zero where a window has no target.|own|m2_accumulation::test_zero_targets
attention|sees_one_ahead|The mask lets a token see the next one.|own|m1_causality::test_later_tokens
attention|no_document_mask|Tokens attend across documents.|example/trainer#12|m1_documents::test_isolation
attention|tiled_key_heads|Repeats the key heads as a tile instead of interleaving them.|own|m1_documents::test_isolation
rope|interleaved_pairs|Rotates neighbours instead of halves.|example/trainer#34|m1_positions::test_relative
rope|positions_not_reset|Positions run on over documents.|own|m1_documents::test_isolation
make_labels|double_shift|Shifts labels that the loss shifts again.|example/decoder#7|m1_labels::test_one_hot_oracle
make_labels|no_shift|The label is the input token itself.|own|m1_labels::test_next_token
clip_grad_norm|clips_each_microbatch|Clips before the window is whole.|meta-pytorch/torchtune PR#1875|m2_clip::test_once_after_accumulation
learning_rate|by_steps|Counts updates instead of supervised tokens.|own|m2_schedule::test_table
optimizer_step|decays_without_gradient|Weight decay where there is no gradient.|own|m2_optimizer::test_against_torch
optimizer_step|no_bias_correction|Leaves out the bias correction of the second moment.|own|m2_optimizer::test_against_torch
param_groups|decays_norms|Weight decay on the gains of the norms.|example/decoder#24|m2_optimizer::test_against_torch
build_model|untied_after_load|Loading leaves two tensors where there was one.|example/hub#295|m1_tied::test_same_storage
build_model|weights_in_bfloat16|Keeps no float32 master weights.|own|m2_precision::test_master_weights
parameter_count|counts_the_head_twice|Counts a tied head as its own matrix.|own|m0_ledger::test_parameter_formula
training_flops|forgets_attention|Leaves out the products of queries and keys.|own|m0_ledger::test_flops_formula
training_memory|master_weights_left_out|Forgets the float32 copy.|own|m0_ledger::test_memory
evaluate|mean_of_batch_means|Averages the means of batches.|example/evaluation#5|m0_evaluation::test_perplexity_and_bits_per_byte
""".strip().splitlines()  # noqa: E501

BENIGN = """
accumulate|reversed_microbatches|Takes the microbatches in reverse.|another summation order|m2_accumulation::test_partition
attention|explicit_softmax|Writes the softmax out instead of calling the fused one.|the same sum, rounded elsewhere|m1_documents::test_isolation
attention|masked_by_minimum|Adds the least float instead of minus infinity.|both vanish after exp|m1_causality::test_later_tokens
optimizer_step|one_tensor_at_a_time|A loop instead of the fused update.|the same arithmetic|m2_optimizer::test_against_torch
rope|angles_in_float64|Angles in float64.|more precise than asked|m1_positions::test_relative
""".strip().splitlines()  # noqa: E501


def large_records(seed=1):
    """Twenty-one gates with cases, faults, benign variants and curves."""
    draw = random.Random(seed)
    records = []
    for line in GATES:
        name, claim, roles, cases = line.split("|")
        file, function = name.split()
        for case in cases.split() or [""]:
            gate = f"{file}::test_{function}"
            made = record(gate, *_measure(gate, draw), case=case, roles=roles.split())
            curves = _curves(draw, case) if file in ("m2_descent", "m2_overfit") else []
            records.append({**made, "claim": claim, "series": curves})
    cases = {}
    for made in records:
        cases.setdefault(made["gate"], []).append(made["case"])
    claims = {made["gate"]: made["claim"] for made in records}
    for kind, lines in (("fault", FAULTS), ("benign", BENIGN)):
        for line in lines:
            role, name, summary, origin, gate = line.split("|")
            for case in cases[gate]:
                error = draw.uniform(0.02, 2) if kind == "fault" else draw.uniform(1e-16, 4e-15)
                shown = measurement(
                    "relative error",
                    error,
                    at_most=1e-12,
                    because=LINEAR,
                    count=draw.choice([1, 60]),
                )
                made = variant(kind, name, role, summary, origin, gate, shown, case=case)
                records.append({**made, "claim": claims[gate]})
    return records


def _measure(gate, draw):
    if gate.startswith("m0"):
        count = draw.randrange(10**5, 10**10)
        return [measurement("counted and computed", count, equal=count, unit="parameters")]
    if "descent" in gate or "overfit" in gate:
        fall = draw.uniform(0.9, 2.5)
        return [
            measurement(
                "fall of the loss",
                fall,
                at_least=0.5,
                because="a third of what the slowest of five seeds reached",
                unit="nats per token",
            )
        ]
    if "near_uniform" in gate:
        return [
            measurement(
                "loss minus ln V",
                draw.uniform(-0.02, 0.02),
                within=[-0.05, 0.05],
                because="logits of std 0.1 move the expected loss by half their variance",
                unit="nats",
            )
        ]
    return [
        measurement("shape", [2, 64, 128], equal=[2, 64, 128], because="a gradient has its own"),
        measurement(
            "relative gradient error",
            10 ** draw.uniform(-16, -12.02),
            at_most=1e-12,
            because=LINEAR,
            count=60,
        ),
        measurement(
            "gradient norm ratio",
            1 + draw.uniform(-5e-13, 5e-13),
            within=[1 - 1e-12, 1 + 1e-12],
            because="Adam hides an error of scale; the norm does not",
        ),
    ]


def _curves(draw, case):
    steps = list(range(1, 2001 if case == "library" else 101))
    fall = [1.1 + 4.4 * math.exp(-i / len(steps) * 6) + draw.gauss(0, 0.05) for i in steps]
    norm = [1.5 + 3 * math.exp(-i / 20) + abs(draw.gauss(0, 0.2)) for i in steps]
    names = [("training loss", fall), ("training loss, bfloat16", [v + 0.06 for v in fall])]
    curves = [
        {"name": n, "x": steps, "y": y, "x_label": "update", "y_label": "nats per token"}
        for n, y in names
    ]
    return [
        *curves,
        {
            "name": "gradient norm",
            "x": steps,
            "y": norm,
            "x_label": "update",
            "y_label": "gradient norm",
        },
    ]


def failed_records():
    """The large run with one failure of each sort in it."""
    records = large_records(2)
    bad = measurement("relative gradient error", 3.2e-9, at_most=1e-12, because=LINEAR, count=12)
    for place, made in enumerate(records):
        if made["gate"] == "m2_accumulation::test_partition" and made["kind"] == "gate":
            if made["case"] in ("4", "8"):
                shape = made["measurements"][0]
                records[place] = {
                    **made,
                    "measurements": [shape, bad],
                    "verdict": "FAIL",
                    "reason": "relative gradient error: measured 3.2e-09, must be at most 1e-12",
                }
        elif made["gate"] == "m1_tied::test_same_storage" and made["case"] == "meta":
            reason = "RuntimeError: Cannot copy out of meta tensor; no data!"
            records[place] = {**made, "measurements": [], "verdict": "ERROR", "reason": reason}
        elif made.get("variant", {}).get("name") == "by_steps" and made["case"] == "stable":
            passed = measurement("relative error", 2e-16, at_most=1e-12, because=LINEAR)
            records[place] = {**made, "measurements": [passed], "verdict": "PASS", "reason": ""}
        elif made.get("variant", {}).get("name") == "masked_by_minimum":
            nan = measurement("relative error", math.nan, at_most=1e-12, because=LINEAR)
            reason = "relative error: measured nan, must be at most 1e-12"
            records[place] = {**made, "measurements": [nan], "verdict": "FAIL", "reason": reason}
        elif made["gate"] == "m2_precision::test_master_weights" and made["kind"] == "gate":
            records[place] = not_run(made, "This CPU has no bfloat16 matrix products.")
    return records


def candidates():
    return [
        {
            "role": role,
            "module": "fastops.kernels",
            "version": "0.4.2",
            "file": f"fastops/{role}.py",
            "sha256": ("9f86d081884c7d65" * 4),
        }
        for role in ("accumulate", "attention", "rms_norm")
    ]


def simulated_records():
    reason = "The package torch_npu is not installed; install the one that matches PyTorch 2.13.0."
    records = [r for r in large_records(3) if r["milestone"] == "M1"]
    return [not_run(r, reason) if i % 3 == 0 else r for i, r in enumerate(records)]


def main(folder):
    folder = Path(folder)
    write(folder / "passed", large_records())
    dirty = run_line(candidates=candidates())
    dirty["environment"]["dirty"] = ["fastops/attention.py", "gates/m2_clip.py"]
    write(folder / "failed", failed_records(), dirty)
    selection = {**run_line()["selection"], "allow_incomplete": True, "expression": "M1 or M4"}
    device = {"kind": "npu", "name": "fake-acl", "missing": "", "simulated": True}
    asked = run_line(device=device, selection=selection, command=["pytest", "--device", "npu"])
    write(folder / "incomplete", simulated_records(), asked)
    for name in ("passed", "failed", "incomplete"):
        print(render(folder / name))


if __name__ == "__main__":
    main(sys.argv[1])
