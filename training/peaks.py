"""How fast known GPUs multiply matrices at best: what the use of a device (MFU) is measured against."""

import re

from training.hardware import Format, Gpu

_Rates = dict[Format, float]


def _rates(fp32: float, half: float, *, bf16: bool = True) -> _Rates:
    return {"fp32": fp32 * 1e12, "fp16": half * 1e12, **({"bf16": half * 1e12} if bf16 else {})}


PEAKS: tuple[tuple[str, _Rates], ...] = (
    # GeForce and workstation boards: appendices of the GA102 and Ada whitepapers, FP16 with FP32 accumulation.
    (r"GeForce RTX 3090$", _rates(35.6, 71)),
    (r"GeForce RTX 4090$", _rates(82.6, 165.2)),
    (r"RTX A6000", _rates(38.7, 154.8)),
    (r"RTX 6000 Ada", _rates(91.1, 364.2)),
    # Everything else: NVIDIA's data sheet of that name; where it prints rates with sparsity only, half of them.
    (r"B200", _rates(80, 2250)),
    (r"GH200", _rates(67, 989.5)),
    (r"H200 NVL", _rates(60, 835.5)),
    (r"H200", _rates(67, 989.5)),
    (r"H100 NVL", _rates(60, 835.5)),
    (r"H100 PCIe", _rates(51, 756.5)),
    (r"H100", _rates(67, 989.5)),
    (r"A100", _rates(19.5, 312)),
    (r"A40", _rates(37.4, 149.7)),
    (r"A30", _rates(10.3, 165)),
    (r"A10G", _rates(35, 70)),
    (r"A10", _rates(31.2, 125)),
    (r"L40S", _rates(91.6, 362.05)),
    (r"L40", _rates(90.5, 181.05)),
    (r"L4", _rates(30.3, 121)),
    (r"V100S", _rates(16.4, 130, bf16=False)),
    (r"V100-PCIE", _rates(14, 112, bf16=False)),
    (r"V100", _rates(15.7, 125, bf16=False)),
    (r"T4", _rates(8.1, 65, bf16=False)),
)
"""A word of the driver's name for a GPU, and its FLOP/s: tensor cores without sparsity in 16 bits, and in fp32 the
plain units, since PyTorch does not round fp32 products to TF32 by itself. The first that fits counts."""


def find_peak(gpu: Gpu, precision: Format) -> float | None:
    """FLOP/s; None for a GPU that is not known, or a part of one (MIG), or a format that it has not."""
    if "MIG" in gpu.name:
        return None
    rates = next((rates for word, rates in PEAKS if re.search(rf"\b{word}(?!\w)", gpu.name)), None)
    return rates.get(precision) if rates else None
