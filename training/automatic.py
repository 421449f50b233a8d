"""The rules of what was left automatic. docs/automatic-values.md lists them with what they rest on.

`why` collects the reason of each value that a rule decided, by the field's name.
"""

import math

from training.facts import DataFacts, ModelFacts
from training.fields import Steps
from training.spec import Hyperparameters, JobSpec, NextTokenHyperparameters, PreferenceHyperparameters

GIB = 2**30
DEFAULT_WARMUP_RATIO = 0.03
DEFAULT_DECAY_RATIO = 0.2
CHECKPOINTS_ROOM_BYTES = 32 * GIB
SMALL_ADAPTER_RATES = {
    "ia3": (3e-3, "3e-3 for IA3 (Liu et al. 2022, section 3.5)"),
    "prefix": (5e-3, "5e-3 for prefix tuning, the best of PEFT's comparison of methods"),
    "prompt": (1e-3, "1e-3 for prompt tuning, the best of PEFT's comparison of methods"),
}
PREFERENCE_RATES = {
    "dpo": (1e-5, "1e-5 for adapters, as TRL recommends: ten times the 1e-6 of Rafailov et al. 2023, appendix B"),
    "kto": (5e-6, "5e-6, the default of the authors' code (Ethayarajh et al. 2024) and the most that TRL recommends"),
}
"""With low-rank adapters, which is how preferences are trained here."""


def make_beta(asked: PreferenceHyperparameters, why: dict[str, str] | None = None) -> float:
    if asked.beta != "auto":
        return asked.beta
    if why is not None:
        why["beta"] = "0.1 (Rafailov et al. 2023, appendix B; Ethayarajh et al. 2024)"
    return 0.1


def decide_packing(asked: Hyperparameters, why: dict[str, str]) -> bool:
    if not isinstance(asked, NextTokenHyperparameters):
        return False
    if asked.packing != "auto":
        return asked.packing
    why["packing"] = "rows are laid end to end without padding either way; batch_size then counts rows"
    return False


def make_batch_size(spec: JobSpec, rows: int, why: dict[str, str]) -> int:
    """About 0.2% of the rows, OpenAI's published default, kept within 4 to 32: below, steps are noise; above, LoRA
    loses against full fine-tuning ("LoRA Without Regret", Schulman et al. 2025). The rows of a kto step also give its
    reference point, for which TRL recommends 16 at least."""
    asked = spec.hyper
    if asked.batch_size != "auto":
        return asked.batch_size
    cuts = [n for n in (asked.micro_batch_size, asked.gradient_accumulation_steps) if n != "auto"]
    ranks = spec.layout.data
    if len(cuts) == 2:
        why["batch_size"] = "micro_batch_size x gradient_accumulation_steps" + (
            f" x {ranks} ranks" if ranks > 1 else ""
        )
        return math.prod(cuts) * ranks
    unit = math.prod(cuts) * ranks
    least = 16 if spec.method.type == "kto" else 4
    wanted = min(max(least, round(0.002 * rows)), 32, rows)
    why["batch_size"] = f"0.2% of the rows, from {least} to 32"
    if unit > 1:
        why["batch_size"] += f", rounded up to a multiple of {unit}"
    return math.ceil(wanted / unit) * unit


def make_length(asked: Hyperparameters, data: DataFacts, batch: int, why: dict[str, str]) -> tuple[float, int, int]:
    """Epochs, steps, steps of a whole epoch. An epoch ends with its own last, maybe smaller, window: no row is dropped
    or carried over. Automatic epochs follow OpenAI's published rule: 3, but at least 100 and at most 25,000 examples.
    """
    rows = data.counts.trained_rows if decide_packing(asked, {}) else data.examples
    steps_per_epoch = math.ceil(data.examples / batch)
    if asked.max_steps is not None:
        return asked.max_steps / steps_per_epoch, asked.max_steps, steps_per_epoch
    epochs = asked.n_epochs
    if epochs == "auto":
        epochs = 3.0
        if rows * 3 < 100:
            epochs = float(min(25, 100 // rows))
        elif rows * 3 > 25_000:
            epochs = float(max(1, 25_000 // rows))
        why["n_epochs"] = "3, but at least 100 and at most 25,000 examples in all, and at most 25 epochs"
    whole = math.floor(epochs)
    # Rounded first: 0.1 + 0.2 epochs of 10 rows are 3 rows, not 4.
    part = math.ceil(round(data.examples * (epochs - whole), 6) / batch)
    return epochs, whole * steps_per_epoch + part, steps_per_epoch


def make_learning_rate(spec: JobSpec, model: ModelFacts, why: dict[str, str]) -> float:
    """5e-5 x (2000 / hidden size)^p, ten times that for LoRA ("LoRA Without Regret", Schulman et al. 2025); p was
    fitted as 0.781 on Llama and 0.0775 on Qwen, on models from 2048 wide on: narrower ones are taken as 2048. Answers
    that are compared with the base model's, and small adapters, have rates of their own."""
    asked = spec.hyper
    if asked.learning_rate != "auto":
        return asked.learning_rate
    if spec.method.type in PREFERENCE_RATES:
        rate, why["learning_rate"] = PREFERENCE_RATES[spec.method.type]
    elif spec.adapter.type in SMALL_ADAPTER_RATES:
        rate, why["learning_rate"] = SMALL_ADAPTER_RATES[spec.adapter.type]
    else:
        power = 0.0775 if "qwen" in model.family else 0.781
        rate = 5e-5 * (2000 / max(model.hidden_size, 2048)) ** power
        why["learning_rate"] = f"5e-5 x (2000 / hidden size)^{power:g} (Schulman et al. 2025)"
        if spec.adapter.is_low_rank:
            rate *= 10
            why["learning_rate"] += ", times 10 for LoRA"
    if asked.learning_rate_multiplier != "auto":
        rate *= asked.learning_rate_multiplier
        why["learning_rate"] += f", times the multiplier {asked.learning_rate_multiplier:g}"
    return float(f"{rate:.3g}")


def make_warmup_steps(asked: Hyperparameters, steps: int, why: dict[str, str]) -> int:
    if asked.warmup_steps is not None:
        return min(asked.warmup_steps, steps)
    ratio = DEFAULT_WARMUP_RATIO if asked.warmup_ratio is None else asked.warmup_ratio
    if asked.warmup_ratio is None:
        why["warmup_steps"] = "3% of the run (the settings of QLoRA, Dettmers et al. 2023)"
    return math.ceil(ratio * steps)


def make_decay_steps(asked: Hyperparameters, steps: int, why: dict[str, str]) -> int:
    """What the warm-up leaves of the share that was asked for."""
    if asked.lr_scheduler != "wsd":
        return 0
    if asked.decay_ratio is None:
        why["decay_steps"] = "the last 20% of the run (Haegele et al. 2024)"
    ratio = DEFAULT_DECAY_RATIO if asked.decay_ratio is None else asked.decay_ratio
    return min(math.ceil(round(ratio * steps, 6)), steps - make_warmup_steps(asked, steps, {}))


def make_every(name: str, asked: Steps, steps: int, why: dict[str, str]) -> int:
    """An interval in steps. Automatic: a tenth of the run, so that the curve has points and little is lost."""
    if asked == "auto":
        why[name] = "a tenth of the run, at least 10 steps"
        return max(10, math.ceil(steps / 10))
    return max(1, round(asked * steps)) if asked < 1 else int(asked)


def make_save_total_limit(asked: Hyperparameters, model: ModelFacts, why: dict[str, str]) -> int:
    """What is trained stands in a checkpoint in fp32 with Adam's two moments. Two at least: one may be damaged."""
    if asked.save_total_limit != "auto":
        return asked.save_total_limit
    why["save_total_limit"] = f"as many as take {CHECKPOINTS_ROOM_BYTES // GIB} GiB, from 2 to 10"
    return min(10, max(2, CHECKPOINTS_ROOM_BYTES // (12 * max(1, model.trained_parameters))))
