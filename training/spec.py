"""What was asked: the create body of a job as a frozen value, every field checked and named in its error."""

import difflib
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from training.adapter import Adapter
from training.deepspeed_config import CommsLogger, DeepSpeed, ZeroOptimization, find_idle
from training.devices import Layout, Parallelism, Resources, find_conflict, find_pipeline_conflict, make_layout
from training.errors import SpecError
from training.fields import Auto, Part, Steps, Switch, at, not_together, real, show, whole

MAX_EPOCHS = 10_000

Attention = Literal["sdpa", "flash", "eager"]

Optimizer = Literal["adamw", "adamw_8bit", "paged_adamw_8bit", "adafactor"]

MAX_SEED = 2**31 - 1
"""The limit of the OpenAI API."""

NOT_OFFERED = {
    "integrations": "integrations are not offered yet; leave the field out",
    "validation_split": "splitting the training file is not offered yet; upload a validation_file instead",
}
"""Fields of the contract that this version refuses by name rather than to ignore them."""

VALUES_NOT_OFFERED = {
    "method.type": ("orpo",),
}
"""Values of the contract that this version refuses by name, by the field's path or its last part."""


class EarlyStopping(Part):
    """The run ends when the validation loss falls no more; the result is the checkpoint where it was lowest."""

    patience: Annotated[int, whole(1)] = 3
    "Evaluations in a row without a gain, after which the run ends."
    min_delta: Annotated[float, real(0)] = 0.0
    "The validation loss has to fall by more than this to count as a gain."


class Hyperparameters(Part):
    """The numbers of any run; what is `auto` is resolved in `plan.py`, with its reason."""

    n_epochs: Annotated[float | Auto, real(0, MAX_EPOCHS, above=True, auto=True)] = "auto"
    "Passes over the training file; fractions are allowed."
    max_steps: Annotated[int | None, whole(1)] = None
    "Optimizer steps, in the place of n_epochs."
    batch_size: Annotated[int | Auto, whole(1, auto=True)] = "auto"
    "Examples in one optimizer step, over all devices."
    micro_batch_size: Annotated[int | Auto, whole(1, auto=True)] = "auto"
    "Rows in one forward pass on one device."
    gradient_accumulation_steps: Annotated[int | Auto, whole(1, auto=True)] = "auto"
    "Forward passes of each rank in one optimizer step; batch_size = micro_batch_size x this x data-parallel ranks."
    learning_rate: Annotated[float | Auto, real(0, above=True, auto=True)] = "auto"
    "The peak rate."
    learning_rate_multiplier: Annotated[float | Auto, real(0, above=True, auto=True)] = "auto"
    "Times the automatic rate, in the place of learning_rate."
    lr_scheduler: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    "How the rate falls after the warm-up; wsd keeps the peak and falls at the end only."
    decay_ratio: Annotated[float | None, real(0, 1)] = None
    "Of wsd: the share of the run in which the rate falls; 0.2 where it is not given."
    warmup_ratio: Annotated[float | None, real(0, 1, below=True)] = None
    "Share of the run in which the rate rises; 0.03 where neither this nor warmup_steps is given."
    warmup_steps: Annotated[int | None, whole(0)] = None
    "Steps in which the rate rises."
    weight_decay: Annotated[float, real(0)] = 0.0
    max_grad_norm: Annotated[float, real(0)] = 1.0
    "Gradients are clipped to this global norm; 0 turns clipping off."
    optimizer: Optimizer = "adamw"
    "8bit: moments in 8 bits (Dettmers et al. 2022); paged: they move to the host's memory where the GPU runs full."
    max_seq_len: Annotated[int | Auto, whole(8, auto=True)] = "auto"
    "Tokens of the longest row; auto is what the model and the data allow."
    truncation: Literal["error", "drop", "truncate"] = "truncate"
    "What happens to a longer row. A row left with no trained token is dropped and counted. pretrain cuts into pieces."
    eval_steps: Steps = "auto"
    save_steps: Steps = "auto"
    save_total_limit: Annotated[int | Auto, whole(1, auto=True)] = "auto"
    "Checkpoints that are kept. The newest and the best always are."
    early_stopping: EarlyStopping | None = None
    "Off where it is not given; needs a validation file."

    @model_validator(mode="after")
    def _agree(self) -> Self:
        not_together(self, "n_epochs", "max_steps")
        not_together(self, "learning_rate", "learning_rate_multiplier")
        not_together(self, "warmup_ratio", "warmup_steps")
        if self.decay_ratio is not None and self.lr_scheduler != "wsd":
            raise at("decay_ratio", f'belongs to lr_scheduler "wsd"; leave it out with "{self.lr_scheduler}"')
        batch, micro, cuts = self.batch_size, self.micro_batch_size, self.gradient_accumulation_steps
        if isinstance(micro, int) and isinstance(batch, int) and batch % micro:
            raise at("micro_batch_size", f"{micro} does not divide batch_size {batch}")
        if isinstance(cuts, int) and isinstance(batch, int) and batch % cuts:
            raise at("gradient_accumulation_steps", f"{cuts} does not divide batch_size {batch}")
        return self


class NextTokenHyperparameters(Hyperparameters):
    packing: Switch = "auto"
    "Several rows in one sequence of up to max_seq_len tokens, none seeing another; batch_size then counts sequences."


class SupervisedHyperparameters(NextTokenHyperparameters):
    train_on: Literal["assistant", "last", "all"] = "assistant"
    "Which tokens carry loss; a message's own weight of 0 or 1 wins."


class PreferenceHyperparameters(Hyperparameters):
    beta: Annotated[float | Auto, real(0, 2, above=True, auto=True)] = "auto"
    "How strongly the model is held to the base model, or to what it starts from; auto is 0.1."


class KtoHyperparameters(PreferenceHyperparameters):
    desirable_weight: Annotated[float, real(0, above=True)] = 1.0
    "Weight of the loss of rows labelled true."
    undesirable_weight: Annotated[float, real(0, above=True)] = 1.0
    "Weight of the loss of rows labelled false."


class Stability(Part):
    """What happens when a step goes wrong: the run ends, the step changes no weights, or the run goes back to its last
    checkpoint with half the learning rate."""

    on_nan: Literal["stop", "skip", "rollback"] = "stop"
    "Where the loss or the gradient is not finite."
    on_spike: Literal["report", "stop", "skip", "rollback"] = "report"
    "Where the loss is far above those of the steps before."
    spike_factor: Annotated[float, real(1)] = 10.0
    "How far: in standard deviations above the median, both estimated robustly from the last 50 steps."


class _Supervised(Part):
    hyperparameters: SupervisedHyperparameters = SupervisedHyperparameters()


class _Dpo(Part):
    hyperparameters: PreferenceHyperparameters = PreferenceHyperparameters()


class _Kto(Part):
    hyperparameters: KtoHyperparameters = KtoHyperparameters()


class _Pretrain(Part):
    hyperparameters: NextTokenHyperparameters = NextTokenHyperparameters()


class Method(Part):
    """What is learnt from the rows; the numbers stand under the name of the type."""

    type: Literal["supervised", "dpo", "kto", "pretrain"] = "supervised"
    supervised: _Supervised | None = None
    dpo: _Dpo | None = None
    kto: _Kto | None = None
    pretrain: _Pretrain | None = None

    @model_validator(mode="after")
    def _only_its_own(self) -> Self:
        for name in sorted(self.model_fields_set - {"type", self.type}):
            raise at(name, f'the type of the method is "{self.type}"; set type to "{name}", or leave this out')
        return self

    @property
    def hyperparameters(self) -> Hyperparameters | None:
        given: _Supervised | _Dpo | _Kto | _Pretrain | None = getattr(self, self.type)
        return given.hyperparameters if given else None


def _require_base_behind(method: str, adapter: Adapter) -> None:
    """The reference of a preference method is the base model, or what the job starts from: the same weights with the
    adapter switched off, or with another one."""
    if adapter.type == "full":
        why = f"{method} compares with the base model, which a full fine-tuning changes"
        raise at("adapter.type", f'{why}; use an adapter, such as type "lora", which can be switched off')
    if adapter.type not in ("lora", "qlora"):
        raise at("adapter.type", f'{method} is offered with "lora" and "qlora"')
    if adapter.init == "pissa":
        raise at("adapter.init", f"{method} compares with the base model, which PiSSA takes apart; leave it out")


class JobSpec(Part):
    """A job as asked. `parse_spec` makes one; `model_dump(exclude_unset=True)` gives the asked body back."""

    spec_version: Literal[1] = 1
    model: Annotated[str, Field(min_length=1, max_length=512)]
    training_file: Annotated[str, Field(min_length=1, max_length=4096)]
    validation_file: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    resume_from: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    "A checkpoint or the result of an earlier job, whose weights this one starts with; dpo and kto compare with them."
    suffix: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    seed: Annotated[int | None, whole(0, MAX_SEED)] = None
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None = Field(
        default=None, max_length=16
    )
    method: Method = Method()
    hyperparameters: SupervisedHyperparameters | None = None
    "The old place of the OpenAI API, for supervised jobs; read where `method` holds none."
    adapter: Adapter = Adapter()
    precision: Literal["auto", "fp32", "fp16", "bf16"] = "auto"
    "The compute type; what is trained is kept in fp32 with any of them."
    gradient_checkpointing: Switch = "auto"
    "Whether activations are computed again for the backward pass in the place of being kept."
    activation_offloading: Switch = "auto"
    "Whether activations wait for the backward pass in the host's memory in the place of the GPU's."
    attention: Attention | Auto = "auto"
    "sdpa is PyTorch's own; flash the package flash-attn, which the GPU host has to have; eager stores the matrix."
    stability: Stability = Stability()
    resources: Resources = Resources()
    parallelism: Parallelism = Parallelism()
    deepspeed: DeepSpeed | None = None
    "A DeepSpeed config, laid over the one that the strategies zero1, zero2 and zero3 derive: its performance alone."

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        place = f"method.{self.method.type}.hyperparameters"
        if self.hyperparameters is not None and (self.method.hyperparameters or self.method.type != "supervised"):
            raise at("hyperparameters", f"give them in one place: {place}")
        if self.has_reference:
            _require_base_behind(self.method.type, self.adapter)
        if self.resume_from is not None and self.adapter.init == "pissa":
            why = "PiSSA begins with the principal part of the base's weights, not with those of an earlier job"
            raise at("adapter.init", f"{why}; leave it out, or resume_from")
        if self.suffix is not None and not re.fullmatch(r"[A-Za-z0-9._-]+", self.suffix):
            raise at("suffix", "letters, digits, dots, hyphens and underscores only: it becomes part of a model name")
        if self.hyper.early_stopping is not None and self.validation_file is None:
            raise at(
                f"{self.hyperparameters_path}.early_stopping",
                "needs a validation_file, whose loss it goes by; name one",
            )
        return self

    @model_validator(mode="after")
    def _fits_its_devices(self) -> Self:
        layout, offloading = self.layout, self.activation_offloading is True
        conflict = find_conflict(
            layout,
            self.adapter,
            self.hyper.optimizer,
            activation_offloading=offloading,
            offload=self.parallelism.offload,
        )
        if conflict is None and self.deepspeed is not None:
            conflict = find_idle(self.deepspeed, layout.strategy)
        if conflict is None and layout.tensor > 1 and self.deepspeed is not None:
            conflict = at("deepspeed", "DeepSpeed does not step what parallelism.tensor has split; leave it out")
        conflict = conflict or find_pipeline_conflict(
            layout, self.adapter, self.method.type, self.attention, activation_offloading=offloading
        )
        if conflict is None and layout.context > 1 and self.has_reference:
            conflict = at("parallelism.context", f"{self.method.type} needs whole rows on a rank; leave it at 1")
        if conflict is not None:
            raise conflict
        self._require_whole_cuts(layout.data)
        return self

    def _require_whole_cuts(self, ranks: int) -> None:
        """batch_size = micro_batch_size x gradient_accumulation_steps x data-parallel ranks."""
        names = ("micro_batch_size", "gradient_accumulation_steps")
        given = {name: size for name in names if isinstance(size := getattr(self.hyper, name), int)}
        batch = self.hyper.batch_size
        if not isinstance(batch, int):
            return
        sizes = [f"{name} {size}" for name, size in given.items()] + (
            [f"{ranks} data-parallel ranks"] if ranks > 1 else []
        )
        whole = math.prod(given.values()) * ranks
        field = f"{self.hyperparameters_path}.{(['batch_size', *given])[-1]}"
        if len(given) == 2 and batch != whole:
            message = f"batch_size {batch} is not {' x '.join(sizes)}; leave one of the three out"
            raise at(field, message)
        if batch % whole:
            message = (
                f"batch_size {batch} is not a multiple of {' x '.join(sizes)}; {whole * -(-batch // whole)} is one"
            )
            raise at(field, message)

    @property
    def hyper(self) -> Hyperparameters:
        """The hyperparameters, from wherever they were given."""
        return self.method.hyperparameters or self.hyperparameters or _HYPERPARAMETERS[self.method.type]()

    @property
    def hyperparameters_path(self) -> str:
        return "hyperparameters" if self.hyperparameters else f"method.{self.method.type}.hyperparameters"

    @property
    def has_reference(self) -> bool:
        """Whether the method compares the model with one that is not trained."""
        return self.method.type in ("dpo", "kto")

    @property
    def layout(self) -> Layout:
        return make_layout(self.parallelism, self.resources)

    @property
    def needs_bitsandbytes(self) -> bool:
        return self.adapter.type == "qlora" or self.hyper.optimizer.endswith("8bit")

    def asked(self) -> dict[str, Any]:
        """The body as it was asked, without the fields that were not given."""
        return self.model_dump(mode="json", exclude_unset=True)


_HYPERPARAMETERS: dict[str, type[Hyperparameters]] = {
    "supervised": SupervisedHyperparameters,
    "dpo": PreferenceHyperparameters,
    "kto": KtoHyperparameters,
    "pretrain": NextTokenHyperparameters,
}


def parse_spec(body: object) -> JobSpec:
    """Check a create body.

    Raises:
        SpecError: with the path of the first field at fault and what would be right.
    """
    if not isinstance(body, dict):
        raise SpecError(f"the body has to be a JSON object, not {show(body)}", code="invalid_body")
    _check_texts(body, "")
    try:
        return JobSpec.model_validate(_without_nulls(body))
    except ValidationError as bad:
        raise _as_spec_error(bad.errors()[0]) from None


def load_spec(path: Path) -> JobSpec:
    """Read and check a create body that stands in a JSON file.

    Raises:
        SpecError: also where there is no such file, or it holds no JSON.
    """
    try:
        return parse_spec(json.loads(path.read_bytes()))
    except OSError as error:
        raise SpecError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{path}: not JSON ({error})") from None


def _check_texts(value: Any, path: str) -> None:
    """Refuse text that no database and no file name can hold."""
    if isinstance(value, str):
        fault = "a NUL character" if "\0" in value else None
        fault = "half of a surrogate pair" if any("\ud800" <= letter <= "\udfff" for letter in value) else fault
        if fault:
            raise SpecError(f"{path}: the text holds {fault}; take it out", param=path)
    elif isinstance(value, dict):
        for name, item in value.items():
            _check_texts(name, path)
            _check_texts(item, f"{path}.{name}".lstrip("."))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            _check_texts(item, f"{path}[{number}]")


def _without_nulls(value: Any) -> Any:
    """Explicit nulls mean "not given" (clients of the OpenAI API send them)."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return value


def _as_spec_error(error: ErrorDetails) -> SpecError:
    path = [str(part) for part in error["loc"] if not _is_union_tag(part)]
    context = error.get("ctx") or {}
    if "field" in context:
        path.append(context["field"])
    param = ".".join(path)
    say = _MESSAGES.get(error["type"], _plain_message)
    code = {"extra_forbidden": "unknown_field", "missing": "missing_field"}.get(error["type"], "invalid_value")
    code = context.get("code", code)
    if error["type"] == "extra_forbidden" and path[-1] in VALUES_NOT_OFFERED["method.type"] and path[:-1] == ["method"]:
        return SpecError(f"{param}: this method is not offered yet", param=param, code="not_offered")
    if error["type"] == "extra_forbidden" and path[-1] in NOT_OFFERED:
        return SpecError(f"{param}: {NOT_OFFERED[path[-1]]}", param=param, code="not_offered")
    if error["type"] == "literal_error" and _is_not_offered(param, error["input"]):
        offered = str(error["ctx"]["expected"]).replace("'", '"')
        message = f"{param}: {show(error['input'])} is not offered yet; there is {offered}"
        return SpecError(message, param=param, code="not_offered")
    return SpecError(f"{param}: {say(error)}", param=param, code=code)


def _is_not_offered(param: str, value: object) -> bool:
    names = (param, param.rpartition(".")[2])
    return any(value in VALUES_NOT_OFFERED.get(name, ()) for name in names)


def _plain_message(error: ErrorDetails) -> str:
    return error["msg"]


def _is_union_tag(part: str | int) -> bool:
    return isinstance(part, str) and ("[" in part or part in ("str", "bool", "int"))


def _unknown_field(error: ErrorDetails) -> str:
    name = str(error["loc"][-1])
    known = _fields_at(error["loc"][:-1])
    near = difflib.get_close_matches(name, known, n=1)
    return "unknown field" + (f'; did you mean "{near[0]}"?' if near else f"; known are {', '.join(sorted(known))}")


def _fields_at(path: tuple[str | int, ...]) -> list[str]:
    names = [str(part) for part in path]
    kinds: dict[str, type[BaseModel]] = {
        "method": Method,
        "supervised": _Supervised,
        "dpo": _Dpo,
        "kto": _Kto,
        "pretrain": _Pretrain,
        "hyperparameters": _HYPERPARAMETERS[names[1] if len(names) > 2 else "supervised"],
        "early_stopping": EarlyStopping,
        "adapter": Adapter,
        "stability": Stability,
        "resources": Resources,
        "parallelism": Parallelism,
        "deepspeed": DeepSpeed,
        "zero_optimization": ZeroOptimization,
        "comms_logger": CommsLogger,
    }
    return list(kinds[names[-1]].model_fields if path else JobSpec.model_fields)


_MESSAGES: dict[str, Callable[[ErrorDetails], str]] = {
    "extra_forbidden": _unknown_field,
    "missing": lambda _: "this field is required",
    "burnish": lambda e: str(e["ctx"]["message"]),
    "literal_error": lambda e: f"{show(e['input'])} is not one of {e['ctx']['expected']}".replace("'", '"'),
    "string_type": lambda e: f"{show(e['input'])} is not text",
    "string_too_short": lambda e: f"at least {e['ctx']['min_length']} character(s) expected",
    "string_too_long": lambda e: f"at most {e['ctx']['max_length']} characters are allowed, got {len(e['input'])}",
    "too_long": lambda e: f"at most {e['ctx']['max_length']} entries are allowed, got {len(e['input'])}",
    "dict_type": lambda e: f"{show(e['input'])} is not an object",
    "model_type": lambda e: f"{show(e['input'])} is not an object",
}
