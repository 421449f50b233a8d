"""Dynamic loss scaling (Micikevicius et al. 2018, arXiv:1710.03740): keeps small gradients within what fp16 holds."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

GROWTH_INTERVAL = 2000
LOWEST = 1.0


@dataclass
class LossScale:
    """The factor on the loss: doubled after 2000 good steps in a row, halved when a gradient overflows."""

    factor: float = 65536.0
    good_steps: int = 0
    first_factor: float | None = None
    "That a step was tried with before the factor fell; None where it did not fall in this step."

    def unscale(self, gradients: Iterable[Tensor]) -> None:
        torch._foreach_mul_(list(gradients), 1 / self.factor)  # a power of two: nothing is rounded

    def suits(self, grad_norm: float) -> bool:
        """Whether a lower factor is of no use. Where the gradient overflows at the lowest one too, it is the rows: the
        steps after it get the factor back that it began with."""
        overflows = not math.isfinite(grad_norm)
        if overflows and self.factor > LOWEST:
            return False
        if overflows and self.first_factor is not None:
            self.factor = self.first_factor
        self.first_factor = None
        return True

    def fall(self) -> None:
        self.first_factor = self.first_factor or self.factor
        self.factor /= 2
        self.good_steps = 0

    def count_good_step(self) -> None:
        self.good_steps += 1
        if self.good_steps == GROWTH_INTERVAL:
            self.factor *= 2
            self.good_steps = 0

    def as_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}
