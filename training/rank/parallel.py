"""On how many devices a model is trained, behind one small protocol, so that the loop does not know."""

import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from training.errors import TrainingError
from training.plan import Plan
from training.rank.group import Alone, Group
from training.rank.loss_scale import LossScale
from training.rank.model import DTYPES, cast_weights
from training.rank.optim import build_optimizer, set_rate
from training.rank.passes import Pass, Scores

T = TypeVar("T")
Score = Callable[[Sequence[Any]], Scores]
"What the rows of one pass come to, by the model."

PIECE = 2**16
"""Numbers whose squares are added up in fp32."""


class Parallel(Protocol):
    """A model with its optimizer. All ranks call the same methods in the same order."""

    model: nn.Module
    device: torch.device
    group: Group
    "All ranks of the run."
    data_rank: int
    data_ranks: int
    "Among these the rows of a window are shared; each makes the same number of passes."
    random_rank: int
    "Ranks with the same one drop the same activations."
    loss_scale: LossScale | None
    "Only where gradients are computed in fp16."
    scratch: Path
    "A folder on a disk, where gathered tensors lie while they are written; the run directory."
    steps_by_engine: bool
    "Gradients must go to its engine: a trial of the model by itself would leave half of one behind."

    def compute(self) -> AbstractContextManager[Any]:
        """Where a forward pass is made by itself: sets the compute type."""

    def train_passes(self, passes: Sequence[Pass[Any]], score: Score, weight: float) -> Iterator[Scores]:
        """Make the passes that this rank has of a window; what each comes to, in their order. The gradient of the loss,
        summed over all ranks and divided by `weight`, is left on the weights: after the last of them the whole of it.
        """

    def score_passes(self, passes: Sequence[Pass[Any]], score: Score) -> Iterator[Scores]:
        """What each pass comes to, without gradients."""

    def clip(self) -> Tensor:
        """The global norm of the gradients, the loss scale taken off; then they are clipped to `max_grad_norm`."""

    def step(self, learning_rate: float) -> None:
        """Change the weights and forget the gradients."""

    def drop_gradients(self) -> None: ...

    def total(self, value: Tensor) -> Tensor:
        """A sum over the ranks that share the rows."""

    def peak_memory_bytes(self) -> int:
        """Of the rank that has the highest."""

    def gather_weights(self) -> dict[str, Tensor]:
        """Whole weights, by their names in the model's `state_dict`, on rank 0; other ranks may get none. Frozen ones
        beside an adapter may be left out."""

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Put whole weights, given to every rank by their names in the model, in the place of its own."""

    def cast_weights(self, dtype: torch.dtype) -> None:
        """Nothing is trained after it."""

    def optimizer_state(self) -> dict[str, Any]:
        """Whole moments by the names of their weights under `state`, on rank 0; the loss scale. So a run may go on on
        another number of ranks."""

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Given to every rank."""


class SingleDevice:
    """One GPU, or the CPU."""

    data_rank, data_ranks = 0, 1
    random_rank = 0
    scratch = Path()
    steps_by_engine = False

    def __init__(self, model: nn.Module, plan: Plan, group: Group | None = None) -> None:
        self.model = model
        self.device = torch.device(plan.device)
        self.group = group or Alone()
        self.loss_scale = LossScale() if plan.precision == "fp16" else None
        self._plan = plan
        self._trained = self._find_trained(model)
        self._optimizer = self._build_optimizer(plan)

    def compute(self) -> AbstractContextManager[Any]:
        if self._plan.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, DTYPES[self._plan.precision])

    def train_passes(self, passes: Sequence[Pass[Any]], score: Score, weight: float) -> Iterator[Scores]:
        for number, part in enumerate(passes, 1):
            last = number == len(passes)
            scores = self.forward(partial(score, part.rows), last=last)
            self.backward(scores.loss / weight * part.counts, last=last)
            yield scores

    def score_passes(self, passes: Sequence[Pass[Any]], score: Score) -> Iterator[Scores]:
        for part in passes:
            with torch.no_grad(), self.compute():
                scores = score(part.rows)
            yield scores

    def forward(self, work: Callable[[], T], *, last: bool) -> T:  # noqa: ARG002 - nothing is summed over ranks
        """Make a forward pass whose loss goes to `backward`; `last` is that of its window."""
        with self.compute():
            return work()

    def backward(self, loss: Tensor, *, last: bool) -> None:  # noqa: ARG002
        """Add the gradient of a rank's part of the loss; with the `last` one of a window the gradients of all ranks are
        summed."""
        (loss if self.loss_scale is None else loss * self.loss_scale.factor).backward()

    def clip(self) -> Tensor:
        weights = list(self._trained.values())
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        if self.loss_scale is not None:
            self.loss_scale.unscale(gradients)
        norm = self._find_norm(gradients)
        if self._plan.max_grad_norm:
            nn.utils.clip_grads_with_norm_(weights, self._plan.max_grad_norm, norm)
        return norm

    def step(self, learning_rate: float) -> None:
        set_rate(self._optimizer, learning_rate)
        self._change_weights()
        if self.loss_scale is not None:
            self.loss_scale.count_good_step()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def total(self, value: Tensor) -> Tensor:
        return value

    def peak_memory_bytes(self) -> int:
        return self.group.highest(self._own_peak_bytes())

    def gather_weights(self) -> dict[str, Tensor]:
        return self.model.state_dict()

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        unknown = self.model.load_state_dict(weights, strict=False).unexpected_keys
        if unknown:
            raise TrainingError(f"the model has no weights {unknown[:3]}")

    def cast_weights(self, dtype: torch.dtype) -> None:
        cast_weights(self.model, dtype)

    def optimizer_state(self) -> dict[str, Any]:
        scale = {} if self.loss_scale is None else {"loss_scale": self.loss_scale.as_dict()}
        state, names = self._optimizer.state_dict()["state"], self._list_names()
        moments = {names[place]: self._whole(names[place], found) for place, found in state.items()}
        return {"state": moments, **scale}

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        if self.loss_scale is not None:
            self.loss_scale = LossScale(**state["loss_scale"])
        groups = self._optimizer.state_dict()["param_groups"]
        moments = {
            place: self._own_part(name, state["state"][name])
            for place, name in enumerate(self._list_names())
            if name in state["state"]
        }
        self._optimizer.load_state_dict({"state": moments, "param_groups": groups})

    def _find_trained(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """What the optimizer steps, by the names of the model's weights."""
        return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}

    def _build_optimizer(self, plan: Plan) -> torch.optim.Optimizer:
        return build_optimizer(self._trained, plan)

    def _change_weights(self) -> None:
        self._optimizer.step()

    def _find_norm(self, gradients: list[Tensor]) -> Tensor:
        return find_norm(gradients)

    def _own_peak_bytes(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def _whole(self, name: str, moments: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        return moments

    def _own_part(self, name: str, moments: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        """Of the moments of a weight what this rank keeps."""
        return moments

    def _list_names(self) -> list[str]:
        """The names of the weights, in the order in which the optimizer counts them."""
        names = {weight: name for name, weight in self._trained.items()}
        return [names[weight] for group in self._optimizer.param_groups for weight in group["params"]]


def find_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The norm of all their numbers. On a CPU PyTorch adds up the squares of one tensor in fp32, which is off by 4e-4
    with ten million of them: there they are added up piece by piece."""
    pieces = [piece for each in tensors for piece in (each.reshape(-1).split(PIECE) if each.is_cpu else (each,))]
    return nn.utils.get_total_norm(pieces)
