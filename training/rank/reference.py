"""What a preference method compares with: the base model or, where a job starts with an earlier adapter, that adapter,
kept frozen beside the trained one over the same base."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from training.rank.weights import TRAINED, load_adapter

REFERENCE = "reference"


def add_reference(model: nn.Module, folder: Path) -> None:
    """Give the model a second adapter with the weights of a folder, in fp32. Nothing trains or saves it."""
    model.add_adapter(REFERENCE, copy.copy(model.peft_config[TRAINED]))
    # By its gradients peft tells which adapter is at work, and `load_adapter` which weights have to be there.
    model.set_adapter(REFERENCE)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.float()
    load_adapter(model, folder, REFERENCE)
    model.set_adapter(TRAINED)


@contextmanager
def as_reference(model: nn.Module) -> Iterator[None]:
    """The model as what it is compared with. No gradient may be computed meanwhile."""
    if REFERENCE not in getattr(model, "peft_config", {}):
        with model.disable_adapter():
            yield
        return
    model.set_adapter(REFERENCE, inference_mode=True)
    try:
        yield
    finally:
        model.set_adapter(TRAINED)
