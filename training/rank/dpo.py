"""Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290): the chosen answer above the rejected one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from training.rank.data import Pair, Prepared, prepare_pairs
from training.rank.loss import log_probabilities
from training.rank.objective import Sums, Window, judging
from training.rank.parallel import Parallel
from training.rank.passes import PassLimit, Scores


@dataclass(frozen=True)
class Dpo:
    """The reference is the model itself without its adapter, or with the one that the job started with."""

    truncation: str
    beta: float

    def prepare(self, path: Path, tokenizer: Any, max_seq_len: int) -> Prepared:
        return prepare_pairs(path, tokenizer, max_seq_len=max_seq_len, truncation=self.truncation)

    def weigh(self, examples: Sequence[Pair]) -> int:
        return len(examples)

    def open_window(
        self,
        parallel: Parallel,  # noqa: ARG002 - nothing has to be computed beforehand
        examples: Sequence[Pair],
        limit: PassLimit,  # noqa: ARG002
        stop_asked: Callable[[], bool],  # noqa: ARG002
    ) -> Window | None:
        return Window(self.weigh(examples))

    def score(self, model: nn.Module, examples: Sequence[Pair], window: Window) -> Scores:  # noqa: ARG002
        rows = [*(pair.chosen for pair in examples), *(pair.rejected for pair in examples)]
        with judging(model, reference=True):
            reference = log_probabilities(model, rows, len(examples))
        logps = log_probabilities(model, rows, len(examples))
        chosen, rejected = (self.beta * (logps - reference)).chunk(2)
        logps_chosen, logps_rejected = logps.detach().chunk(2)
        return Scores(
            compute_loss(chosen, rejected),
            {
                "rewards_chosen": chosen.sum(),
                "rewards_rejected": rejected.sum(),
                "reward_accuracy": (chosen > rejected).sum(),
                "reward_margin": (chosen - rejected).sum(),
                "logps_chosen": logps_chosen.sum(),
                "logps_rejected": logps_rejected.sum(),
            },
        )

    def make_metrics(self, sums: Sums, window: Window) -> dict[str, float]:
        return {name: value / window.weight for name, value in sums.items() if name != "loss"}

    def make_evaluation(self, sums: Sums, window: Window) -> dict[str, float]:
        return {f"eval_{name}": value for name, value in self.make_metrics(sums, window).items()}


def compute_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Equation 7, summed over pairs. The arguments are rewards: beta x log(model / reference) of each answer."""
    return -functional.logsigmoid(chosen - rejected).sum()
