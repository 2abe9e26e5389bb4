"""Devices: what is there, what is missing, and the numerics flags that every run forces."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import asdict, dataclass

import torch

DTYPES = {  # what operators are asked for on each kind, the widest first
    "cpu": (torch.float64, torch.float32, torch.bfloat16, torch.float16),
    "cuda": (torch.float64, torch.float32, torch.bfloat16, torch.float16),
    "npu": (torch.float32, torch.bfloat16, torch.float16),
}
HALF = (torch.bfloat16, torch.float16)
KINDS = tuple(DTYPES)


def has_float64(kind: str) -> bool:
    """Whether devices of the kind compute in float64."""
    return torch.float64 in DTYPES.get(kind, ())


@dataclass(frozen=True)
class Device:
    """The device of a run. ``missing`` says why it cannot be used, and what to install."""

    kind: str
    name: str
    missing: str = ""
    simulated: bool = False

    def describe(self) -> dict[str, object]:
        """The fields, as the evidence keeps them."""
        return asdict(self)


def find(kind: str) -> Device:
    """The device of a kind. Never another kind in its place.

    Raises:
        ValueError: an unknown kind.
    """
    if kind == "cpu":
        return Device("cpu", _cpu_name())
    if kind == "cuda":
        return _cuda()
    if kind == "npu":
        return _npu()
    raise ValueError(f"unknown device {kind!r}; choose one of {', '.join(KINDS)}")


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:  # not Linux: the architecture is what can be told
        pass
    return os.uname().machine


def _cuda() -> Device:
    if torch.version.cuda is None:
        return Device(
            "cuda",
            "",
            f"PyTorch {torch.__version__} is a build without CUDA; install a CUDA build of torch "
            "on a machine with an NVIDIA GPU.",
        )
    if not torch.cuda.is_available():
        return Device(
            "cuda",
            "",
            f"PyTorch {torch.__version__} was built for CUDA {torch.version.cuda} but finds no "
            "GPU; check `nvidia-smi`, the driver and CUDA_VISIBLE_DEVICES.",
        )
    return Device("cuda", torch.cuda.get_device_name())


def _npu() -> Device:
    if importlib.util.find_spec("torch_npu") is None:
        return Device(
            "npu",
            "",
            "The package torch_npu is not installed; install the torch_npu that matches "
            f"PyTorch {torch.__version__}, and CANN, on a machine with an Ascend NPU.",
        )
    module = torch.get_device_module("npu")
    if not module.is_available():
        return Device(
            "npu",
            "",
            "torch_npu is installed but finds no NPU; check `npu-smi info`, the driver and CANN.",
        )
    return Device("npu", str(module.get_device_name()))


def force_numerics(device: Device) -> dict[str, str]:
    """Forbid every shortcut in precision and order; return the flags as they then stand.

    TF32, HF32 and reductions in half precision are off and deterministic algorithms are on:
    https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_default_dtype(torch.float32)
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(True)
    torch.set_grad_enabled(True)
    matmul = torch.backends.cuda.matmul
    matmul.allow_tf32 = False
    matmul.allow_fp16_reduced_precision_reduction = False
    matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = False
    if device.kind == "npu" and not device.missing:
        npu = torch.get_device_module("npu")
        npu.matmul.allow_hf32 = False
        npu.conv.allow_hf32 = False
    return numerics(device)


def numerics(device: Device) -> dict[str, str]:
    """The flags that change numbers, as they stand."""
    matmul = torch.backends.cuda.matmul
    flags = {
        "torch.get_default_dtype": str(torch.get_default_dtype()),
        "torch.get_float32_matmul_precision": torch.get_float32_matmul_precision(),
        "torch.are_deterministic_algorithms_enabled": str(
            torch.are_deterministic_algorithms_enabled()
        ),
        "cuda.matmul.allow_tf32": str(matmul.allow_tf32),
        "cuda.matmul.allow_fp16_reduced_precision_reduction": str(
            matmul.allow_fp16_reduced_precision_reduction
        ),
        "cuda.matmul.allow_bf16_reduced_precision_reduction": str(
            matmul.allow_bf16_reduced_precision_reduction
        ),
        "cudnn.allow_tf32": str(torch.backends.cudnn.allow_tf32),
        "cudnn.benchmark": str(torch.backends.cudnn.benchmark),
        "torch.is_grad_enabled": str(torch.is_grad_enabled()),
        "torch.get_num_threads": str(torch.get_num_threads()),
        "CUBLAS_WORKSPACE_CONFIG": os.environ["CUBLAS_WORKSPACE_CONFIG"],
    }
    if device.kind == "npu" and not device.missing:
        npu = torch.get_device_module("npu")
        flags["npu.matmul.allow_hf32"] = str(npu.matmul.allow_hf32)
        flags["npu.conv.allow_hf32"] = str(npu.conv.allow_hf32)
    return flags
