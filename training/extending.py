"""What may change of a spec where a run goes on: how long it is, and what does not touch the training itself."""

from typing import Any

from training.errors import SpecError
from training.spec import JobSpec

MAY_CHANGE = {"suffix", "metadata", "resources", "parallelism", "deepspeed"}
HYPER_MAY_CHANGE = {"n_epochs", "max_steps", "eval_steps", "save_steps", "save_total_limit", "early_stopping"}


def make_lasting(spec: JobSpec) -> dict[str, Any]:
    """The fields of a spec that make it this run and no other, by name."""
    fields = {
        name: value for name, value in spec.asked().items() if name not in {*MAY_CHANGE, "method", "hyperparameters"}
    }
    hyper = spec.hyper.model_dump(mode="json", exclude_unset=True)
    lasting = {name: value for name, value in hyper.items() if name not in HYPER_MAY_CHANGE}
    return {**fields, **lasting, "method": spec.method.type}


def require_same_run(earlier: JobSpec, asked: JobSpec, where: str) -> None:
    """Raises SpecError naming the first field that may not change where a run goes on."""
    before, after = make_lasting(earlier), make_lasting(asked)
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    if changed:
        raise SpecError(
            f"{changed[0]}: not as in the run of {where}, whose checkpoints would be gone on from. Only "
            f"{', '.join(sorted(HYPER_MAY_CHANGE | MAY_CHANGE))} may change; choose another run directory",
            param=changed[0],
            code="other_run",
        )


def require_target(spec: JobSpec, steps: int, done: int) -> None:
    """Raises SpecError where the run is longer already than what is asked."""
    if steps >= done:
        return
    name = "max_steps" if spec.hyper.max_steps is not None else "n_epochs"
    param = f"{spec.hyperparameters_path}.{name}"
    raise SpecError(
        f"{param}: {steps} steps in all, and the run has made {done} already; ask for more, or choose another run "
        "directory",
        param=param,
    )
