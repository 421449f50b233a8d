"""Every random number generator of the process, taken and put back."""

import random
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class RandomState:
    """Plain values and tensors only, so that it can be read back without unpickling code."""

    python: tuple[Any, ...]
    numpy: dict[str, Any]
    torch: Tensor
    cuda: list[Tensor]

    @classmethod
    def take(cls) -> "RandomState":
        name, keys, place, has_gauss, gauss = np.random.get_state()
        return cls(
            python=random.getstate(),
            numpy={"name": name, "keys": keys.tolist(), "place": place, "has_gauss": has_gauss, "gauss": gauss},
            torch=torch.get_rng_state(),
            # Of this rank's own GPU: asking would put a context on it, also where the run is on the CPU.
            cuda=[torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [],
        )

    def restore(self) -> None:
        random.setstate(self.python)
        numpy, keys = self.numpy, np.array(self.numpy["keys"], dtype=np.uint32)
        np.random.set_state((numpy["name"], keys, numpy["place"], numpy["has_gauss"], numpy["gauss"]))
        torch.set_rng_state(self.torch)
        # A checkpoint may come from a host without a GPU, or be read on one.
        if self.cuda and torch.cuda.is_available():
            torch.cuda.set_rng_state(self.cuda[0])

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
