"""Activations that wait for the backward pass in the host's memory (Rhu et al. 2016, arXiv:1602.08124)."""

from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

MIN_BYTES = 2**20
"""To move less takes longer to start than to do."""


@dataclass(frozen=True)
class Moved:
    """A copy on the host, and how the tensor lay on its device."""

    host: Tensor
    device: torch.device
    stride: tuple[int, ...]


class Offloading:
    """Moves what `layers`, a part of the model, saves for the backward pass, and brings it back when it is needed.

    With gradient checkpointing that is the input of each layer. The bits are the same, and so is the way they lie in
    memory, which decides how matrix libraries round. Weights, and their copies in the compute type, stay: they are no
    activations. The output head is left out: the backward pass begins with it. Copies wait in the queue of the
    computation, so that a step takes longer by the time they take.
    """

    def __init__(self, model: nn.Module, layers: nn.Module, *, min_bytes: int = MIN_BYTES) -> None:
        self.moved = 0
        "Tensors so far."
        self._weights = list(model.parameters())
        self._device = self._weights[0].device
        self._min_bytes = min_bytes
        self._weight_shapes = {shape for w in self._weights if w.requires_grad for shape in (w.shape, w.shape[::-1])}
        self._places: set[int] = set()
        self._tokens = 0
        self._of_this_pass: dict[tuple[Any, ...], Moved] = {}
        self._wrap(layers)

    def _wrap(self, layers: nn.Module) -> None:
        forward = layers.forward

        @wraps(forward)
        def offloading(*args: Any, **kwargs: Any) -> Any:
            # Anew each time: to load a checkpoint may put weights elsewhere.
            self._places = {weight.untyped_storage().data_ptr() for weight in self._weights}
            self._tokens = _count_tokens(*args, **kwargs)
            try:
                with saved_tensors_hooks(self._pack, _unpack):
                    return forward(*args, **kwargs)
            finally:
                self._of_this_pass.clear()

        layers.forward = offloading

    def _pack(self, tensor: Tensor) -> Tensor | Moved:
        if not self._may_move(tensor):
            return tensor
        # Several layers save the same input. The weak reference keeps the name of a storage from being given again.
        place = (StorageWeakRef(tensor.untyped_storage()), tensor.storage_offset(), tensor._version)
        key = (*place, tensor.shape, tensor.stride(), tensor.dtype)
        if key not in self._of_this_pass:
            self._of_this_pass[key] = _move(tensor)
            self.moved += 1
        return self._of_this_pass[key]

    def _may_move(self, tensor: Tensor) -> bool:
        expanded = any(size > 1 and step == 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        return (
            tensor.nbytes >= self._min_bytes
            and tensor.device == self._device
            and not expanded
            and tensor.untyped_storage().data_ptr() not in self._places
            # A copy of a weight in the compute type is told by its shape.
            and (tensor.shape not in self._weight_shapes or self._tokens in tensor.shape)
        )


def _count_tokens(input_ids: Tensor | None = None, *, inputs_embeds: Tensor | None = None, **_: Any) -> int:
    """As a transformers model takes its input."""
    given = inputs_embeds if input_ids is None else input_ids
    return 0 if given is None else given.shape[1]


def _move(tensor: Tensor) -> Moved:
    pinned = tensor.device.type == "cuda"
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
    return Moved(host.copy_(tensor, non_blocking=pinned), tensor.device, tensor.stride())


def _unpack(packed: Tensor | Moved) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    back = torch.empty_strided(packed.host.shape, packed.stride, dtype=packed.host.dtype, device=packed.device)
    return back.copy_(packed.host, non_blocking=True)
