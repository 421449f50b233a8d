"""Training, as a list of verbs."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from training.errors import TrainingError
from training.events import EventLog
from training.plan import Plan
from training.rank.checkpoint import Checkpoints, Progress
from training.rank.data import Trained, sequences_of
from training.rank.early_stopping import is_best, note_evaluation, patience_is_out
from training.rank.evaluate import evaluate
from training.rank.loss import count_tokens, count_trained
from training.rank.objective import Objective, Totals
from training.rank.optim import learning_rate_at
from training.rank.order import cut, epochs_done, make_window
from training.rank.parallel import Parallel
from training.rank.random_state import RandomState
from training.rank.stop import Stop
from training.rundir import checkpoint_name


@dataclass(frozen=True)
class Run:
    """All that a run consists of. `rows_per_pass` is the micro-batch, or 1 where the model cannot take several rows."""

    plan: Plan
    objective: Objective
    parallel: Parallel
    examples: Sequence[Trained]
    validation: Sequence[Trained]
    rows_per_pass: int
    events: EventLog
    checkpoints: Checkpoints
    progress: Progress
    stop: Stop


def train(run: Run) -> bool:
    """Train from where the progress stands to the last step: True, or False where a stop was asked for before."""
    saved_step = run.progress.step
    if evaluate_when_due(run):
        # The run was stopped before it came to that; its checkpoint lacks the validation loss.
        save_checkpoint(run)
    while goes_on(run) and take_step(run):
        evaluate_when_due(run)
        if checkpoint_due(run):
            save_checkpoint(run)
            saved_step = run.progress.step
    if run.progress.step > saved_step:
        save_checkpoint(run)
    return not goes_on(run) and not evaluation_due(run)


def goes_on(run: Run) -> bool:
    return run.progress.step < run.plan.steps and not patience_is_out(run.progress, run.plan)


def take_step(run: Run) -> bool:
    """One optimizer step. False where a stop was asked for on the way: then all is as it was before the step."""
    begun, random = time.perf_counter(), RandomState.take()
    step = run.progress.step + 1
    rows = [run.examples[row] for row in make_window(len(run.examples), run.plan.batch_size, run.plan.seed, step)]
    sequences = sequences_of(rows)
    tokens, trained_tokens = count_tokens(sequences), count_trained(sequences)
    while (measured := measure(run, rows)) is not None and overflowed(run, measured[0]["train_loss"], measured[1]):
        random.restore()
    if measured is None:
        run.parallel.drop_gradients()
        random.restore()
        return False
    metrics, grad_norm = measured
    scale = run.parallel.loss_scale.factor if run.parallel.loss_scale else None
    learning_rate = learning_rate_at(step, run.plan)
    train_loss = metrics["train_loss"]
    healthy = math.isfinite(train_loss) and math.isfinite(grad_norm)
    if healthy:
        run.parallel.step(learning_rate)
    step_s = time.perf_counter() - begun
    advance(run.progress, tokens, trained_tokens, train_loss, step_s)
    report_step(run, metrics, learning_rate, grad_norm, tokens, step_s, scale)
    if not healthy:
        raise not_finite(step, train_loss, rows)
    return True


def measure(run: Run, rows: Sequence[Trained]) -> tuple[dict[str, float], float] | None:
    """Metrics and gradient norm of a window, its gradient left on the weights, clipped; None as in `accumulate`."""
    metrics = accumulate(run, rows)
    return None if metrics is None else (metrics, float(run.parallel.clip()))


def overflowed(run: Run, train_loss: float, grad_norm: float) -> bool:
    """Whether the gradient went beyond fp16 while the loss did not. Then it is dropped and the scale halved, and the
    same rows are computed again: no weight has changed, no row is lost, the step is not counted."""
    scale = run.parallel.loss_scale
    if scale is None or not math.isfinite(train_loss) or math.isfinite(grad_norm) or not scale.can_fall():
        return False
    run.parallel.drop_gradients()
    before = scale.factor
    scale.fall()
    step = run.progress.step + 1
    message = (
        f"the gradient of step {step} overflowed fp16 at a loss scale of {before:g}: it was skipped, "
        f"and its rows are computed again at {scale.factor:g}"
    )
    data = {"message": message, "code": "loss_scale_lowered", "loss_scale": scale.factor}
    run.events.append("warning", run.progress.step, data)
    return True


def accumulate(run: Run, rows: Sequence[Trained]) -> dict[str, float] | None:
    """The loss and other metrics of a window, its gradient left on the weights; None where a stop was asked for on the
    way."""
    window = run.objective.open_window(run.parallel, rows, run.rows_per_pass, run.stop.asked)
    if window is None:
        return None
    totals = Totals()
    passes = list(cut(rows, run.rows_per_pass))
    for number, part in enumerate(passes, 1):
        if run.stop.asked():
            return None
        with run.parallel.compute():
            scores = run.objective.score(run.parallel.model, part, window)
        # Divided by the weight of the whole window: the result does not depend on how the window is cut.
        run.parallel.backward(scores.loss / window.weight, last=number == len(passes))
        totals.add(scores)
    sums = totals.over_ranks(run.parallel)
    return {"train_loss": sums["loss"] / window.weight, **run.objective.make_metrics(sums, window)}


def advance(progress: Progress, tokens: int, trained_tokens: int, train_loss: float, step_s: float) -> None:
    progress.step += 1
    progress.num_tokens += tokens
    progress.num_trained_tokens += trained_tokens
    progress.train_loss = train_loss
    progress.seconds += step_s


def report_step(
    run: Run,
    metrics: dict[str, float],
    learning_rate: float,
    grad_norm: float,
    tokens: int,
    step_s: float,
    loss_scale: float | None,
) -> None:
    progress = run.progress
    data = {
        **metrics,
        "learning_rate": learning_rate,
        "grad_norm": grad_norm,
        "num_tokens": progress.num_tokens,
        "num_trained_tokens": progress.num_trained_tokens,
        "epoch": epochs_done(len(run.examples), run.plan.batch_size, progress.step),
        "tokens_per_s": tokens / step_s,
        "step_s": step_s,
        "peak_memory_bytes": run.parallel.peak_memory_bytes(),
    }
    if loss_scale is not None:
        data["loss_scale"] = loss_scale
    run.events.append("metrics", progress.step, data)


def evaluation_due(run: Run) -> bool:
    """At every `eval_steps` and at the end; also in a run that was stopped before it came to it."""
    step, every = run.progress.step, run.plan.eval_steps
    if every is None or run.progress.evaluated_step == step:
        return False
    return step == run.plan.steps or step % every == 0


def evaluate_when_due(run: Run) -> bool:
    """Whether it was evaluated: not where it is not due, or a stop was asked for on the way."""
    if not evaluation_due(run):
        return False
    begun = time.perf_counter()
    result = evaluate(run.objective, run.parallel, run.validation, run.rows_per_pass, run.stop.asked)
    if result is None:
        return False
    run.progress.seconds += time.perf_counter() - begun
    run.progress.eval_loss = result.loss if math.isfinite(result.loss) else None
    run.progress.evaluated_step = run.progress.step
    data = {"eval_loss": result.loss, **result.metrics}
    run.events.append("evaluated", run.progress.step, data)
    note_evaluation(run.progress, run.plan, result.loss)
    return True


def checkpoint_due(run: Run) -> bool:
    """At every `save_steps`; with early stopping also where the validation loss is the lowest so far."""
    if evaluation_due(run):
        return False
    return run.progress.step % run.plan.save_steps == 0 or is_best(run.progress)


def save_checkpoint(run: Run) -> None:
    manifest = run.checkpoints.save(run.parallel, run.progress)
    progress = run.progress
    data = {
        "path": f"checkpoints/{checkpoint_name(progress.step)}",
        "bytes": sum(file["bytes"] for file in manifest["files"]),
        "train_loss": progress.train_loss,
        "eval_loss": progress.eval_loss if progress.evaluated_step == progress.step else None,
    }
    run.events.append("checkpoint", progress.step, data)


def not_finite(step: int, train_loss: float, rows: Sequence[Trained]) -> TrainingError:
    what = "gradient" if math.isfinite(train_loss) else "loss"
    lines = ", ".join(str(row.line) for row in rows[:8]) + (", ..." if len(rows) > 8 else "")
    message = (
        f"the {what} of step {step} is not finite (rows of lines {lines}); lower the learning_rate, "
        "or look at these rows"
    )
    return TrainingError(message, code="non_finite_loss")
