"""Training, as a list of verbs."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from training.errors import TrainingError
from training.events import EventLog, Untold
from training.flops import Work
from training.plan import Plan
from training.rank.checkpoint import Checkpoints, Progress, go_back
from training.rank.data import Trained, sequences_of
from training.rank.early_stopping import is_best, note_evaluation, patience_is_out
from training.rank.evaluate import evaluate
from training.rank.loss import count_tokens, count_trained
from training.rank.objective import Objective, Totals
from training.rank.optim import learning_rate_at
from training.rank.order import epochs_done, make_window
from training.rank.parallel import Parallel
from training.rank.passes import PassLimit, share_passes
from training.rank.random_state import RandomState
from training.rank.stability import (
    MAX_ROLLBACKS,
    MAX_SKIPS_IN_A_ROW,
    Measured,
    Trouble,
    find_trouble,
    goes_back,
    note_step,
)
from training.rank.stop import AgreedStop
from training.rank.workload import Workload
from training.rundir import checkpoint_name, verify


@dataclass(frozen=True)
class Run:
    """All that a run consists of. `limit` is the plan's, or a row a pass where the model cannot take several."""

    plan: Plan
    objective: Objective
    parallel: Parallel
    examples: Sequence[Trained]
    validation: Sequence[Trained]
    limit: PassLimit
    workload: Workload
    events: EventLog | Untold
    checkpoints: Checkpoints
    progress: Progress
    stop: AgreedStop


def train(run: Run) -> bool:
    """Train from where the progress stands to the end of the run: True, or False where a stop was asked for before."""
    saved_step = run.progress.step
    if evaluate_when_due(run) or lacks_way_back(run):
        # The run was stopped before it came to its evaluation, or has nothing yet that it could go back to.
        save_checkpoint(run)
    while goes_on(run) and take_step(run):
        evaluate_when_due(run)
        saved_step = min(saved_step, run.progress.step)  # it may have gone back
        if run.progress.step > saved_step and checkpoint_due(run):
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
    work = run.workload.of_window(rows, run.limit)
    while (measured := measure(run, rows)) is not None and overflowed(run, measured.train_loss, measured.grad_norm):
        random.restore()
        run.progress.flops += work.done
    if measured is None:
        run.parallel.drop_gradients()
        random.restore()
        return False
    scale = run.parallel.loss_scale.factor if run.parallel.loss_scale else None
    learning_rate = learning_rate_at(step, run.plan) * run.progress.rate_factor
    trouble = find_trouble(run.plan, run.progress, measured)
    changes_weights = trouble is None or trouble.action == "report"
    if changes_weights:
        run.parallel.step(learning_rate)
        note_step(run.progress, measured.train_loss)
    else:
        run.parallel.drop_gradients()
    step_s = time.perf_counter() - begun
    advance(run.progress, tokens, trained_tokens if changes_weights else 0, step_s)
    utilisation = note_work(run, work, step_s)
    report_step(run, measured, learning_rate, tokens, step_s, scale, utilisation)
    if trouble is not None:
        respond(run, trouble)
    return True


def measure(run: Run, rows: Sequence[Trained]) -> Measured | None:
    """A window after its passes, its gradient left on the weights, clipped; None as in `accumulate`."""
    summed = accumulate(run, rows)
    return None if summed is None else Measured(*summed, grad_norm=float(run.parallel.clip()))


def overflowed(run: Run, train_loss: float, grad_norm: float) -> bool:
    """Whether the gradient went beyond fp16 while the loss did not. Then it is dropped and the scale halved, and the
    same rows are computed again: no weight has changed, no row is lost, the step is not counted."""
    scale = run.parallel.loss_scale
    if scale is None or not math.isfinite(train_loss) or scale.suits(grad_norm):
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


def accumulate(
    run: Run, rows: Sequence[Trained]
) -> tuple[dict[str, float], list[tuple[Sequence[Trained], Tensor]]] | None:
    """The loss and other metrics of a window, and the mean loss of each pass, its gradient left on the weights; None
    where a stop was asked for on the way."""
    window = run.objective.open_window(run.parallel, rows, run.limit, run.stop.asked)
    if window is None:
        return None
    totals = Totals()
    shares = share_passes(rows, run.limit, run.parallel.data_ranks)
    own, score = shares[run.parallel.data_rank], partial(run.objective.score, run.parallel.model, window=window)
    # Divided by the weight of the whole window: the result does not depend on how the window is cut.
    scores = run.parallel.train_passes(own, score, window.weight)
    for part in own:
        if run.stop.asked():
            return None
        totals.add(next(scores), part)
    sums, losses_of_ranks = totals.over_ranks(run.parallel)
    passes = [
        (part.rows, loss / run.objective.weigh(part.rows))
        for parts, losses in zip(shares, losses_of_ranks, strict=True)
        for part, loss in zip(parts, losses, strict=True)
        if part.counts
    ]
    return {"train_loss": sums["loss"] / window.weight, **run.objective.make_metrics(sums, window)}, passes


def respond(run: Run, trouble: Trouble) -> None:
    """Do what the policy says of a step that went wrong; its gradient is dropped already.

    Raises:
        TrainingError: it says stop, or what it says has been done too often.
    """
    progress = run.progress
    told = {"message": trouble.message, "code": trouble.code, "action": trouble.action, "lines": list(trouble.lines)}
    if trouble.action == "stop":
        raise trouble.as_error()
    if trouble.action == "rollback":
        step, factor = roll_back(run, trouble)
        told["message"] += f"; back to step {step}, from now on with {factor:g} x the learning rate"
        told |= {"rolled_back_to": step, "rate_factor": factor}
    if trouble.action == "skip":
        progress.skips_in_a_row += 1
        if progress.skips_in_a_row > MAX_SKIPS_IN_A_ROW:
            raise trouble.as_error(f", as in the {MAX_SKIPS_IN_A_ROW} steps before")
        told["message"] += "; the step changes no weights"
    run.events.append("warning", trouble.step, told)


def roll_back(run: Run, trouble: Trouble) -> tuple[int, float]:
    """Go on from the newest checkpoint with half the rate; its step, and the factor of the rate from now on."""
    steps, factor, spent = run.progress.rolled_back_steps, run.progress.rate_factor, run.progress.spent
    checkpoint = run.parallel.group.first(partial(find_way_back, run))
    if checkpoint is None or len(steps) >= MAX_ROLLBACKS:
        raise trouble.as_error(
            "; there is no checkpoint left" if checkpoint is None else f"; gone back {len(steps)} times"
        )
    checkpoint = run.checkpoints.bring(checkpoint, run.parallel.group)
    go_back(checkpoint, run.parallel, run.progress, run.checkpoints.source)
    # Not written into the checkpoint: a run that is interrupted now meets the same trouble and comes to the same.
    run.progress.rolled_back_steps = [*steps, trouble.step]
    run.progress.rate_factor = factor / 2
    run.progress.spent = spent
    return run.progress.step, run.progress.rate_factor


def find_way_back(run: Run) -> Path | None:
    """Also where this one is damaged there may be another."""
    run_dir, step = run.checkpoints.run_dir, run.progress.way_back_step
    wanted = run_dir.checkpoints / checkpoint_name(step or 0)
    return wanted if verify(wanted) is None else run_dir.find_resume_point()


def advance(progress: Progress, tokens: int, trained_tokens: int, step_s: float) -> None:
    progress.step += 1
    progress.num_tokens += tokens
    progress.num_trained_tokens += trained_tokens
    progress.seconds += step_s


def note_work(run: Run, work: Work, step_s: float) -> float | None:
    """Model FLOPs utilisation of the step: the share of the devices' peak that went into operations that the model
    asks for (PaLM, Chowdhery et al. 2022, appendix B); None where the peak is not known."""
    progress, peak = run.progress, run.plan.compute.peak_flops_per_s
    peak = None if peak is None else peak * run.plan.ranks
    progress.flops += work.done
    progress.steps_s += step_s
    if peak is None:
        return None
    progress.peak_s += work.needed / peak
    return work.needed / peak / step_s


def report_step(
    run: Run,
    measured: Measured,
    learning_rate: float,
    tokens: int,
    step_s: float,
    loss_scale: float | None,
    utilisation: float | None,
) -> None:
    progress = run.progress
    data = {
        **measured.metrics,
        "learning_rate": learning_rate,
        "grad_norm": measured.grad_norm,
        "num_tokens": progress.num_tokens,
        "num_trained_tokens": progress.num_trained_tokens,
        "epoch": epochs_done(len(run.examples), run.plan.batch_size, progress.step),
        "tokens_per_s": tokens / step_s,
        "step_s": step_s,
        "flops": progress.flops,
        "peak_memory_bytes": run.parallel.peak_memory_bytes(),
    }
    if utilisation is not None:
        data["mfu"] = utilisation
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
    result = evaluate(run.objective, run.parallel, run.validation, run.limit, run.stop.asked)
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
    """At every `save_steps` and at the end; with early stopping also where the validation loss is the lowest so far."""
    if evaluation_due(run):
        return False
    return run.progress.step % run.plan.save_steps == 0 or is_best(run.progress) or not goes_on(run)


def lacks_way_back(run: Run) -> bool:
    return goes_back(run.plan) and run.parallel.group.first(lambda: not run.checkpoints.run_dir.list_checkpoints())


def save_checkpoint(run: Run) -> None:
    """Write a checkpoint and tell it. Weights that are not finite are a trouble of their own.

    Raises:
        TrainingError: the weights are not finite, and the policy is not to go back.
    """
    progress, way_back_step = run.progress, run.progress.way_back_step
    if goes_back(run.plan) and (progress.step == 0 or checkpoint_due(run)):
        progress.way_back_step = progress.step
    try:
        manifest = run.checkpoints.save(run.parallel, progress)
    except TrainingError as error:
        if error.code != "non_finite_weights" or run.plan.stability.on_nan != "rollback":
            raise
        progress.way_back_step = way_back_step
        respond(run, Trouble(progress.step, "rollback", error.message, code="non_finite_weights"))
        return
    data = {
        "path": f"checkpoints/{checkpoint_name(progress.step)}",
        "bytes": sum(file["bytes"] for file in manifest["files"]),
        "train_loss": progress.train_loss,
        "eval_loss": progress.eval_loss if progress.evaluated_step == progress.step else None,
    }
    run.events.append("checkpoint", progress.step, data)
