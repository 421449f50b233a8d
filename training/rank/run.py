"""One run from its directory to its end: assemble the parts, train, write the result, close."""

import os
import random
import shutil
import sys
import traceback
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from training.errors import CapacityError, DataError, SpecError
from training.events import EventLog, Untold
from training.extending import require_target
from training.facts import ModelFacts
from training.flops import tokens_per_parameter
from training.hardware import Hardware, find_hardware
from training.plan import Plan, make_plan, may_share_a_pass
from training.rank.apart import (
    can_be_cut,
    depends_on_length,
    find_trial_passes,
    keeps_rows_apart,
    require_trainable,
)
from training.rank.checkpoint import Checkpoints, Progress, load_progress, load_state, load_weights
from training.rank.context import split_passes
from training.rank.copies import bring, find_place
from training.rank.determinism import require_same_bits, train_once, warn_of_other_bits
from training.rank.early_stopping import patience_is_out
from training.rank.failure import explain, tell_torchrun
from training.rank.group import Alone, Group, find_rank, join_group
from training.rank.head import find_head
from training.rank.inputs import Inputs, load_inputs, make_data_facts
from training.rank.lock import lock
from training.rank.loop import Run, train
from training.rank.model import DTYPES, base_dtype, build_model, get_base, make_facts
from training.rank.parallel import Parallel
from training.rank.passes import ROW_BY_ROW, PassLimit
from training.rank.peak import measure_peak
from training.rank.reference import add_reference
from training.rank.start import load_start
from training.rank.stop import AgreedStop, Stop
from training.rank.strategies import build_parallel
from training.rank.weights import is_adapted, load_adapter, save_weights, weights_name
from training.rank.workload import Workload
from training.rundir import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_STOPPED,
    RunDir,
    checkpoint_name,
    commit_folder,
    step_of,
    verify,
    write_json,
)
from training.spec import load_spec

MAX_ROW_WARNINGS = 20


@dataclass(frozen=True)
class Attempt:
    """One try at a run: where it is, how to stop it, where it tells what, and how far it is."""

    run_dir: RunDir
    number: int
    stop: Stop
    events: EventLog | Untold
    progress: Progress


def run(run_dir: RunDir, attempt: int, stop: Stop, *, base_name: str | None = None, plan_only: bool = False) -> int:
    """Go on with the run of a directory, or make only its plan; the exit code. Every ending is told as an event,
    by rank 0; but a failure of one of several ranks by torchrun.py.

    Raises:
        BlockingIOError: another process is at work in this directory.
    """
    rank, ranks = find_rank()
    with ExitStack() as stack:
        if rank == 0:
            stack.enter_context(lock(run_dir.path / "lock", wait=False))
        events = EventLog(run_dir.events, attempt) if rank == 0 else Untold()
        stack.callback(events.close)
        if find_place()[0] > 0:
            stack.callback(shutil.rmtree, run_dir.received, ignore_errors=True)
        this = Attempt(run_dir, attempt, stop, events, Progress())
        try:
            return _plan_and_train(this, base_name, plan_only)
        except Exception as error:  # the last resort: whatever it is, the reader of the events is told
            failure = explain(error)
            if failure is not error or error.__cause__:
                traceback.print_exception(error)
            print(f"error: {failure.message}" if ranks == 1 else f"rank {rank}: {failure.message}", file=sys.stderr)
            if ranks == 1:
                events.append("failed", this.progress.step, failure.as_dict())
            else:
                tell_torchrun(failure, this.progress.step)
            return EXIT_FAILED


def _plan_and_train(this: Attempt, base_name: str | None, plan_only: bool) -> int:
    spec = load_spec(this.run_dir.spec)
    hardware = find_hardware()
    _use_cores(hardware)
    device = "cpu" if spec.resources.gpus == 0 else hardware.kind
    if device == "cuda" and not plan_only:
        _require_gpu()
    group = Alone() if plan_only else join_group(spec.layout.ranks, device)
    found = None if plan_only else group.first(lambda: _find_checkpoint(this))
    found = found and bring(found, group, this.run_dir.received)
    resumed_from = step_of(found) if found else None
    start = {"pid": os.getpid(), "pids": group.gather(os.getpid()), "device": device, "resumed_from": resumed_from}
    this.events.append("started", resumed_from or 0, start)
    inputs = load_inputs(spec, base_name=base_name, weights=not plan_only)
    _require_same_inputs(group, inputs)
    model = make_facts(inputs.source, inputs.config, spec.adapter)
    plan = group.first(lambda: _make_plan(this, inputs, hardware, model, measure=not plan_only))
    this.events.append("plan", resumed_from or 0, plan.as_json())
    if found is None:
        _warn_of_rows(this.events, inputs)
        _warn_of_balance(this.events, inputs)
    if plan_only:
        return EXIT_FINISHED
    parts = _build(this, inputs, plan, group, Workload(model.matmuls, plan, spec.adapter), found)
    if not train(parts):
        this.events.append("stopped", this.progress.step, {"reason": parts.stop.reason})
        return group.first(lambda: EXIT_STOPPED)  # no rank is gone before rank 0 has told it
    if patience_is_out(this.progress, plan):
        this.events.append("early_stopped", this.progress.step, _tell_early_stop(this.progress))
    _save_result(this, inputs, parts)
    this.events.append("finished", this.progress.step, _summary(this.progress, plan))
    return group.first(lambda: EXIT_FINISHED)


def _require_same_inputs(group: Group, inputs: Inputs) -> None:
    """Raises DataError where the files of another node are others."""
    if inputs.spec.layout.nodes == 1:
        return
    digests = group.gather(inputs.fingerprint)
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is not None:
        node = other // inputs.spec.layout.local_ranks
        message = f"the base model, data or weights to start from of node {node} are not those of node 0"
        raise DataError(f"{message}; copy the same files to all nodes", code="other_files")


def _make_plan(this: Attempt, inputs: Inputs, hardware: Hardware, model: ModelFacts, *, measure: bool) -> Plan:
    plan = make_plan(inputs.spec, hardware, model, make_data_facts(inputs))
    if plan.device == "cpu" and measure:
        peak = {"peak_flops_per_s": measure_peak(DTYPES[plan.precision])}
        plan = plan.model_copy(update={"compute": plan.compute.model_copy(update=peak)})
    write_json(this.run_dir.plan, plan.as_json())
    return plan


def _find_checkpoint(this: Attempt) -> Path | None:
    listed = this.run_dir.list_checkpoints()
    found = this.run_dir.find_resume_point()
    for bad in (path for path in listed if not path.exists()):
        message = f"checkpoints/{bad.name} is damaged: set aside as {bad.name}.bad"
        this.events.append("warning", step_of(bad), {"message": message, "code": "damaged_checkpoint"})
    return found


def _build(this: Attempt, inputs: Inputs, plan: Plan, group: Group, workload: Workload, found: Path | None) -> Run:
    """The model on its device and all around it, as at the start or as the checkpoint left it."""
    checkpoints = Checkpoints(
        this.run_dir,
        inputs.fingerprint,
        this.number,
        inputs.tokenizer,
        inputs.source,
        plan.save_total_limit,
    )
    if found:
        checkpoints.require_own(found)
        load_progress(found, this.progress)
        require_target(inputs.spec, plan.steps, this.progress.step)
        _find_best(this, group)
    _seed(plan.seed)
    adapter = inputs.spec.adapter
    weights = found / "model" if found and adapter.type == "full" else None
    model = build_model(inputs.source, plan, adapter, weights)
    if inputs.start and not found:
        load_start(inputs.start, model, inputs.source)
    if inputs.start and inputs.spec.has_reference:
        add_reference(model, inputs.start.folder)
    if found and is_adapted(model):
        load_adapter(model, found / weights_name(model))
    parallel = build_parallel(model, plan, group)
    parallel.scratch = this.run_dir.path
    if parallel.random_rank:
        _seed(plan.seed + parallel.random_rank)  # those with other rows drop other activations
    if found:
        load_state(found, parallel)
    with parallel.compute():
        # Both try the model once, which is not to count with the first step.
        require_trainable(model, parallel.device, adapter)
        find_head(get_base(model))
    if plan.context > 1:
        _share_passes(parallel, plan.context)
    limit = _make_pass_limit(this, parallel, plan, inputs)
    parallel.drop_gradients()  # which an engine may have kept of the trials
    if plan.device == "cuda":
        _require_same_bits(this, parallel, limit)
    return Run(
        plan=plan,
        objective=inputs.objective,
        parallel=parallel,
        examples=inputs.training.examples,
        validation=inputs.validation.examples if inputs.validation else [],
        limit=limit,
        workload=workload,
        events=this.events,
        checkpoints=checkpoints,
        progress=this.progress,
        stop=AgreedStop(this.stop, group),
    )


def _share_passes(parallel: Parallel, ranks: int) -> None:
    """Let so many ranks compute pieces of one pass. Raises SpecError where a model cannot be computed so."""
    base = get_base(parallel.model)
    split_passes(base, ranks)
    with parallel.compute():
        fails = not can_be_cut(parallel.model, parallel.device, ranks)
    if parallel.group.any(fails):
        param = "parallelism.context"
        message = f"{param}: this kind of model cannot be computed in pieces of a row; leave it at 1"
        raise SpecError(f"{message}, and take fsdp or zero3 where memory is short", param=param)


def _make_pass_limit(this: Attempt, parallel: Parallel, plan: Plan, inputs: Inputs) -> PassLimit:
    """The plan's; a row a pass where the model cannot tell rows apart, which changes the speed and not the result.
    Raises SpecError where rows are to be packed all the same."""
    limit = PassLimit(plan.batch_size if plan.tokens_per_pass else plan.micro_batch_size, plan.tokens_per_pass)
    if limit == ROW_BY_ROW and not plan.packing:
        return ROW_BY_ROW
    spec = inputs.spec
    if may_share_a_pass(spec.adapter):
        # On a CPU whole passes take seconds: there they are tried where something hangs on their length.
        # Where ranks share a pass, it may be too long for one.
        is_long = plan.context == 1 and (plan.device == "cuda" or depends_on_length(inputs.config))
        passes = find_trial_passes(inputs.training.examples, limit) if is_long else []
        with parallel.compute():
            mixes = not keeps_rows_apart(parallel.model, parallel.device, passes)
        if not parallel.group.any(mixes):
            return limit
    if plan.packing:
        param = f"{spec.hyperparameters_path}.packing"
        message = f"{param}: this kind of model or adapter mixes up rows of one sequence; set it to false"
        raise SpecError(message, param=param)
    message = "this kind of model mixes up rows of one pass; each row gets a pass of its own"
    this.events.append("warning", this.progress.step, {"message": message, "code": "row_by_row"})
    return ROW_BY_ROW


def _require_same_bits(this: Attempt, parallel: Parallel, limit: PassLimit) -> None:
    if parallel.steps_by_engine:
        warn_of_other_bits()
        return
    lacking = require_same_bits(parallel.model, lambda: train_once(parallel, limit.rows))
    if lacking is not None:
        message = f"{lacking}: if this run is interrupted, what it comes to may differ in the last bits"
        this.events.append("warning", this.progress.step, {"message": message, "code": "not_deterministic"})


def _use_cores(hardware: Hardware) -> None:
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(hardware.cpu_cores)


def _require_gpu() -> None:
    """Raises CapacityError where torch cannot use the GPU that the driver shows."""
    if not torch.cuda.is_available():
        message = (
            "the driver shows a GPU but torch cannot use it; install a torch that fits the driver, "
            "or set resources.gpus to 0"
        )
        raise CapacityError(message, param="resources.gpus", code="device_unusable")


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _warn_of_rows(events: EventLog | Untold, inputs: Inputs) -> None:
    for param, part in {"training_file": inputs.training, "validation_file": inputs.validation}.items():
        issues = part.warnings if part else []
        for issue in issues[:MAX_ROW_WARNINGS]:
            events.append("warning", 0, {**issue.as_dict(), "message": str(issue), "param": param})
        if len(issues) > MAX_ROW_WARNINGS:
            message = f"{len(issues) - MAX_ROW_WARNINGS} more warnings of rows are not listed"
            events.append("warning", 0, {"message": message, "param": param})


def _warn_of_balance(events: EventLog | Untold, inputs: Inputs) -> None:
    """The loss is the cross-entropy alone, from which routers have a gradient too."""
    text = inputs.config.get_text_config()
    share = getattr(text, "router_aux_loss_coef", None)
    if inputs.spec.adapter.type == "full" and getattr(text, "output_router_logits", False) and share:
        message = (
            f"the balance loss of the experts that config.json asks for (router_aux_loss_coef {share:g}) is not added"
        )
        events.append("warning", 0, {"message": message, "code": "balance_loss_left_out", "param": "model"})


def _find_best(this: Attempt, group: Group) -> Path | None:
    """The checkpoint that early stopping found best. One that is damaged or gone is told, and forgotten."""
    step = this.progress.best_step
    if step is None:
        return None
    path = this.run_dir.checkpoints / checkpoint_name(step)
    if group.first(lambda: verify(path)) is None:
        return path
    message = f"the best checkpoint, of step {step}, is damaged or gone; the best of the others counts from now on"
    this.events.append("warning", this.progress.step, {"message": message, "code": "best_checkpoint_lost"})
    this.progress.best_step = this.progress.best_eval_loss = None
    return None


def _save_result(this: Attempt, inputs: Inputs, parts: Run) -> None:
    """Write `adapter/` or `model/`: the best checkpoint with early stopping, else what was trained last. A full
    fine-tune in mixed precision is delivered in the type of its base."""
    parallel, model = parts.parallel, parts.parallel.model
    best = _find_best(this, parallel.group)
    if best is not None and step_of(best) != this.progress.step:
        load_weights(parallel, inputs.source, parts.checkpoints.bring(best, parallel.group))
    if inputs.spec.adapter.type == "full" and parts.plan.precision != "fp32":
        parallel.cast_weights(base_dtype(inputs.config))
    weights = parallel.gather_weights()
    about = {"step": step_of(best) if best else parts.progress.step, "fingerprint": parts.checkpoints.fingerprint}

    def write() -> None:
        target = this.run_dir.path / weights_name(model)
        beside = target.with_name(f".{target.name}")
        shutil.rmtree(beside, ignore_errors=True)
        save_weights(model, weights, inputs.tokenizer, inputs.source, beside)
        commit_folder(beside, target, about)

    parallel.group.first(write)


def _summary(progress: Progress, plan: Plan) -> dict[str, float | None]:
    """`mfu` is null where no step had a peak to be measured against."""
    return {
        "steps": progress.step,
        "tokens": progress.num_tokens,
        "trained_tokens": progress.num_trained_tokens,
        "tokens_per_parameter": tokens_per_parameter(progress.num_tokens, plan.parameters),
        "tokens_per_s": progress.num_tokens / progress.steps_s if progress.steps_s else None,
        "flops": progress.flops,
        "mfu": progress.peak_s / progress.steps_s if progress.peak_s else None,
        "train_loss": progress.train_loss,
        "eval_loss": progress.eval_loss,
        "best_step": progress.best_step,
        "best_eval_loss": progress.best_eval_loss,
        "seconds": progress.seconds,
    }


def _tell_early_stop(progress: Progress) -> dict[str, Any]:
    best = "never finite" if progress.best_step is None else f"lowest at step {progress.best_step}"
    message = (
        f"stopped early at step {progress.step}: no gain in {progress.evaluations_without_gain} evaluations, "
        f"the validation loss was {best}"
    )
    return {"message": message, "best_step": progress.best_step, "best_eval_loss": progress.best_eval_loss}
