"""The reference stack: every role and the plain PyTorch that says what it means.

The signatures of these functions are the signatures of the roles.
"""

from reference.checkpoint import load, save
from reference.data.account import account
from reference.data.batches import batches, shuffle
from reference.data.bpe import train_bpe
from reference.data.contamination import contamination
from reference.data.ids import read_ids, write_ids
from reference.data.labels import make_labels
from reference.data.loader import Loader
from reference.data.manifest import read_manifest
from reference.data.near_duplicates import deduplicate
from reference.data.open_tokenizer import open_tokenizer
from reference.data.order import Interleaving, buffered_shuffle
from reference.data.pack import pack
from reference.data.policy import apply_policy
from reference.data.prepare import prepare
from reference.data.split import split
from reference.distribute import distribute
from reference.evaluate import evaluate
from reference.generate import generate
from reference.hf.weights import load_pretrained, save_pretrained
from reference.ledger.adapters import adapter_memory
from reference.ledger.communication import training_communication
from reference.ledger.flops import training_flops
from reference.ledger.memory import kv_cache_bytes, training_memory
from reference.ledger.parameters import parameter_count, rotary_frequencies
from reference.ledger.time import (
    hardware_flops_utilization,
    model_flops_utilization,
    throughput,
    token_counts,
    training_time,
)
from reference.ledger.windows import count_targets, plan_windows, window_rows
from reference.lora import add_adapters, load_adapters, merge_adapters, save_adapters
from reference.loss import token_nll
from reference.model import build_model
from reference.ops import (
    add_rms_norm,
    attention,
    gated_linear,
    linear,
    projections,
    rms_norm,
    rope,
    swiglu,
)
from reference.optimizer import clip_grad_norm, optimizer_step, param_groups
from reference.schedule import learning_rate
from reference.train import train
from reference.update import accumulate, update_window

OPERATORS = {
    "rms_norm": rms_norm,
    "add_rms_norm": add_rms_norm,
    "rope": rope,
    "attention": attention,
    "swiglu": swiglu,
    "linear": linear,
    "projections": projections,
    "gated_linear": gated_linear,
    "token_nll": token_nll,
}
TRAINING = {
    "build_model": build_model,
    "distribute": distribute,
    "accumulate": accumulate,
    "clip_grad_norm": clip_grad_norm,
    "param_groups": param_groups,
    "optimizer_step": optimizer_step,
    "learning_rate": learning_rate,
    "update_window": update_window,
    "train": train,
    "evaluate": evaluate,
    "save": save,
    "load": load,
}
DATA = {
    "make_labels": make_labels,
    "pack": pack,
    "shuffle": shuffle,
    "batches": batches,
    "apply_policy": apply_policy,
    "account": account,
    "buffered_shuffle": buffered_shuffle,
    "interleave": Interleaving,
    "loader": Loader,
    "open_tokenizer": open_tokenizer,
    "train_bpe": train_bpe,
    "write_ids": write_ids,
    "read_ids": read_ids,
    "prepare": prepare,
    "read_manifest": read_manifest,
    "deduplicate": deduplicate,
    "split": split,
    "contamination": contamination,
}
LEDGER = {
    "parameter_count": parameter_count,
    "rotary_frequencies": rotary_frequencies,
    "training_memory": training_memory,
    "adapter_memory": adapter_memory,
    "training_communication": training_communication,
    "kv_cache_bytes": kv_cache_bytes,
    "training_flops": training_flops,
    "training_time": training_time,
    "model_flops_utilization": model_flops_utilization,
    "hardware_flops_utilization": hardware_flops_utilization,
    "token_counts": token_counts,
    "throughput": throughput,
    "plan_windows": plan_windows,
    "window_rows": window_rows,
    "count_targets": count_targets,
}
WEIGHTS = {
    "load_pretrained": load_pretrained,
    "save_pretrained": save_pretrained,
    "add_adapters": add_adapters,
    "merge_adapters": merge_adapters,
    "save_adapters": save_adapters,
    "load_adapters": load_adapters,
    "generate": generate,
}
ROLES = {**OPERATORS, **TRAINING, **DATA, **LEDGER, **WEIGHTS}
