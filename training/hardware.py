"""What a host has: its GPUs, found through the driver's own library and not through torch, and its CPU."""

import os
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

import psutil
import pynvml
from pydantic import BaseModel, ConfigDict

Format = Literal["fp32", "fp16", "bf16"]
CPU_FORMATS: tuple[Format, ...] = ("fp32", "fp16", "bf16")
"""What torch's autocast computes in on any CPU; without instructions of its own for a format a CPU is slow in it."""


class Gpu(BaseModel):
    model_config = ConfigDict(frozen=True)

    index: int
    name: str
    memory_bytes: int
    compute_capability: tuple[int, int]

    @property
    def formats(self) -> tuple[Format, ...]:
        """NVIDIA chips compute in fp16 from compute capability 5.3 and in bf16 from Ampere (8.0) on."""
        since: dict[Format, tuple[int, int]] = {"fp32": (0, 0), "fp16": (5, 3), "bf16": (8, 0)}
        return tuple(name for name, first in since.items() if self.compute_capability >= first)

    @property
    def runs_flash_attention(self) -> bool:
        """FlashAttention 2 needs Ampere (8.0)."""
        return self.compute_capability >= (8, 0)


class Hardware(BaseModel):
    """The devices that a run may use."""

    model_config = ConfigDict(frozen=True)

    gpus: tuple[Gpu, ...] = ()
    cpu_cores: int
    memory_bytes: int
    has_flash_attention: bool = False
    "Whether the package flash-attn is installed."

    @property
    def kind(self) -> Literal["cuda", "cpu"]:
        return "cuda" if self.gpus else "cpu"


def find_hardware() -> Hardware:
    """The GPUs that this process may use (`CUDA_VISIBLE_DEVICES` is kept to) and the CPU cores given to it."""
    return Hardware(
        gpus=tuple(_visible(_list_gpus())),
        cpu_cores=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        has_flash_attention=_has_flash_attention(),
    )


def _has_flash_attention() -> bool:
    """Version 2, told by what is installed and not by importing it, which would load torch. Later versions are other
    packages, some of which can be imported by the same name."""
    try:
        return version("flash-attn").startswith("2.")
    except PackageNotFoundError:
        return False


def _list_gpus() -> list[Gpu]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return [_describe_gpu(index) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


def _describe_gpu(index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    name = pynvml.nvmlDeviceGetName(handle)
    return Gpu(
        index=index,
        name=name if isinstance(name, str) else name.decode(),
        memory_bytes=pynvml.nvmlDeviceGetMemoryInfo(handle).total,
        compute_capability=tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
    )


def _visible(gpus: list[Gpu]) -> list[Gpu]:
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    if asked is None:
        return gpus
    return [gpu for gpu in gpus if str(gpu.index) in asked.split(",")]
