"""Next-token prediction: on the answers of chat and prompt rows, or on every token of plain texts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from training.rank.data import Prepared, Trained, prepare, prepare_texts, sequences_of
from training.rank.loss import count_trained, make_batch, score
from training.rank.model import find_device
from training.rank.objective import Sums, Window
from training.rank.parallel import Parallel
from training.rank.passes import PassLimit, Scores


class _NextToken:
    """Cross-entropy over the trained tokens of a window, so that neither rows nor passes weigh in."""

    def weigh(self, examples: Sequence[Trained]) -> int:
        return count_trained(sequences_of(examples))

    def open_window(
        self,
        parallel: Parallel,  # noqa: ARG002 - nothing has to be computed beforehand
        examples: Sequence[Trained],
        limit: PassLimit,  # noqa: ARG002
        stop_asked: Callable[[], bool],  # noqa: ARG002
    ) -> Window | None:
        return Window(self.weigh(examples))

    def score(self, model: nn.Module, examples: Sequence[Trained], window: Window) -> Scores:  # noqa: ARG002
        loss, right = score(model, make_batch(sequences_of(examples), find_device(model)))
        return Scores(loss, {"right": right})

    def make_metrics(self, sums: Sums, window: Window) -> dict[str, float]:  # noqa: ARG002 - the loss says it all
        return {}

    def make_evaluation(self, sums: Sums, window: Window) -> dict[str, float]:
        return {"eval_token_accuracy": sums["right"] / window.weight}


@dataclass(frozen=True)
class Supervised(_NextToken):
    truncation: str
    train_on: str

    def prepare(self, path: Path, tokenizer: Any, max_seq_len: int) -> Prepared:
        return prepare(path, tokenizer, max_seq_len=max_seq_len, truncation=self.truncation, train_on=self.train_on)


@dataclass(frozen=True)
class Pretrain(_NextToken):
    truncation: str

    def prepare(self, path: Path, tokenizer: Any, max_seq_len: int) -> Prepared:
        return prepare_texts(path, tokenizer, max_seq_len=max_seq_len, truncation=self.truncation)
