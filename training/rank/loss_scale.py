"""Dynamic loss scaling (Micikevicius et al. 2018, arXiv:1710.03740): keeps small gradients within what fp16 holds."""

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

    def unscale(self, gradients: Iterable[Tensor]) -> None:
        torch._foreach_mul_(list(gradients), 1 / self.factor)  # a power of two: nothing is rounded

    def can_fall(self) -> bool:
        """Whether a lower factor may help. At the lowest one it is not the scale that makes a gradient overflow."""
        return self.factor > LOWEST

    def fall(self) -> None:
        self.factor /= 2
        self.good_steps = 0

    def count_good_step(self) -> None:
        self.good_steps += 1
        if self.good_steps == GROWTH_INTERVAL:
            self.factor *= 2
            self.good_steps = 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
