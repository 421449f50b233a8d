"""On how many devices a model is trained, behind one small protocol, so that the loop does not know."""

import resource
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from training.plan import Plan
from training.rank.loss_scale import LossScale
from training.rank.model import DTYPES
from training.rank.optim import build_optimizer, set_rate


class Parallel(Protocol):
    """A model with its optimizer. All ranks call the same methods in the same order."""

    model: nn.Module
    device: torch.device
    loss_scale: LossScale | None
    "Only where gradients are computed in fp16."

    def compute(self) -> AbstractContextManager[Any]:
        """Where forward passes are made: sets the compute type."""

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add a loss's gradient; with the `last` one of a window the gradients of all ranks are summed."""

    def clip(self) -> Tensor:
        """The global norm of the gradients, the loss scale taken off; then they are clipped to `max_grad_norm`."""

    def step(self, learning_rate: float) -> None:
        """Change the weights and forget the gradients."""

    def drop_gradients(self) -> None: ...

    def total(self, value: Tensor) -> Tensor:
        """A sum over the ranks."""

    def peak_memory_bytes(self) -> int: ...

    def optimizer_state(self) -> dict[str, Any]: ...

    def load_optimizer_state(self, state: dict[str, Any]) -> None: ...


class SingleDevice:
    """One GPU, or the CPU."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self.model = model
        self.device = torch.device(plan.device)
        self.loss_scale = LossScale() if plan.precision == "fp16" else None
        self._plan = plan
        self._trained = [weight for weight in model.parameters() if weight.requires_grad]
        self._optimizer = build_optimizer(model, plan)

    def compute(self) -> AbstractContextManager[Any]:
        if self._plan.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, DTYPES[self._plan.precision])

    def backward(self, loss: Tensor, *, last: bool) -> None:  # noqa: ARG002 - nothing is summed over ranks
        (loss if self.loss_scale is None else loss * self.loss_scale.factor).backward()

    def clip(self) -> Tensor:
        gradients = [weight.grad for weight in self._trained if weight.grad is not None]
        if self.loss_scale is not None:
            self.loss_scale.unscale(gradients)
        norm = nn.utils.get_total_norm(gradients)
        if self._plan.max_grad_norm:
            nn.utils.clip_grads_with_norm_(self._trained, self._plan.max_grad_norm, norm)
        return norm

    def step(self, learning_rate: float) -> None:
        set_rate(self._optimizer, learning_rate)
        self._optimizer.step()
        if self.loss_scale is not None:
            self.loss_scale.count_good_step()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def total(self, value: Tensor) -> Tensor:
        return value

    def peak_memory_bytes(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def optimizer_state(self) -> dict[str, Any]:
        scale = {} if self.loss_scale is None else {"loss_scale": self.loss_scale.as_dict()}
        return {**self._optimizer.state_dict(), **scale}

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        if self.loss_scale is not None:
            self.loss_scale = LossScale(**state["loss_scale"])
        self._optimizer.load_state_dict({name: state[name] for name in ("state", "param_groups")})
