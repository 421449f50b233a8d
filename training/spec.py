"""What was asked: the create body of a job as a frozen value, every field checked and named in its error."""

import difflib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from training.errors import SpecError

Auto = Literal["auto"]

Optimizer = Literal["adamw", "adamw_8bit", "paged_adamw_8bit", "adafactor"]

MAX_SEED = 2**31 - 1
"""The limit of the OpenAI API."""

NOT_OFFERED = {
    "integrations": "integrations are not offered yet; leave the field out",
    "deepspeed": "a DeepSpeed config is not offered yet; leave the field out",
    "parallelism": "training on several devices is not offered yet; leave the field out",
    "validation_split": "splitting the training file is not offered yet; upload a validation_file instead",
}
"""Fields of the contract that this version refuses by name rather than to ignore them."""

VALUES_NOT_OFFERED = {
    "method.type": ("orpo",),
    "attention": ("flash",),
}
"""Values of the contract that this version refuses by name, by the field's path or its last part."""


MAX_NUMBER = 10**9
"""What no number of a job is beyond; larger ones are slips, and would occupy a machine."""
MAX_EPOCHS = 10_000
MAX_REGEX_LENGTH = 1000


def show(value: object) -> str:
    """A value as a person would name it in an error: its text, and its kind where that is the fault."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of about {value.bit_length() * 3 // 10} digits"
    kinds: dict[type, str] = {bool: "a boolean", str: "text", dict: "an object", list: "a list"}
    kind = kinds.get(type(value))
    text = repr(value) if not isinstance(value, str) else f'"{value}"'
    text = text if len(text) <= 80 else text[:77] + "..."
    return f"{text} ({kind})" if kind else text


def _wrong(message: str) -> PydanticCustomError:
    return PydanticCustomError("burnish", "{message}", {"message": message})


def _not_together(part: BaseModel, first: str, second: str) -> None:
    given = part.model_fields_set
    if {first, second} <= given and "auto" not in (getattr(part, first), getattr(part, second)):
        raise _at(second, f"not together with {first}; leave one of the two out")


def _at(field: str, message: str) -> PydanticCustomError:
    """An error of a whole object that belongs to one of its fields."""
    return PydanticCustomError("burnish", "{message}", {"message": message, "field": field})


def _number(
    kind: type, low: float, high: float, *, above: bool = False, auto: bool = False, below: bool = False
) -> PlainValidator:
    """A check for a JSON number within limits; text and booleans are refused, also where they look like one."""
    word = "a whole number" if kind is int else "a number"
    if high == MAX_NUMBER:
        wanted = f"{word} {'greater than' if above else 'of at least'} {low:g}"
    elif below:
        wanted = f"{word} from {low:g} to below {high:g}"
    else:
        wanted = f"{word} {'above' if above else 'from'} {low:g} {'and up' if above else ''} to {high:.10g}"
    wanted = " ".join(wanted.split()) + (' or "auto"' if auto else "")

    def check(value: object) -> object:
        if auto and value == "auto":
            return value
        kinds = (int,) if kind is int else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise _wrong(f"{show(value)} is not {wanted}")
        # Limits first: no whole number is too large to be compared, but many are for a float.
        if not low <= value <= high or (above and value <= low):
            limit = f"; at most {high:,}" if high == MAX_NUMBER and value > high else ""
            raise _wrong(f"{show(value)} is not {wanted}{limit}")
        if below and value >= high:
            raise _wrong(f"{show(value)} is not {wanted}")
        return kind(value)

    schema: Any = Annotated[kind, Field(gt=low) if above else Field(ge=low)]
    return PlainValidator(check, json_schema_input_type=schema | Auto if auto else schema)


def _whole(low: int, high: float = MAX_NUMBER, *, auto: bool = False) -> PlainValidator:
    return _number(int, low, high, auto=auto)


def _real(
    low: float, high: float = MAX_NUMBER, *, above: bool = False, auto: bool = False, below: bool = False
) -> PlainValidator:
    return _number(float, low, high, above=above, auto=auto, below=below)


def _steps(value: object) -> object:
    """`auto`, a number of steps, or a share of the run in (0, 1)."""
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_NUMBER):
        return value
    if isinstance(value, float) and (0 < value < 1 or (1 <= value <= MAX_NUMBER and value.is_integer())):
        return value if value < 1 else int(value)
    raise _wrong(f'{show(value)} is not "auto", a whole number of steps of at least 1, or a share of the run in (0, 1)')


def _switch(value: object) -> object:
    if value == "auto" or isinstance(value, bool):
        return value
    raise _wrong(f'{show(value)} is not "auto", true or false')


Switch = Annotated[bool | Auto, PlainValidator(_switch, json_schema_input_type=bool | Auto)]

Steps = Annotated[
    int | float | Auto,
    PlainValidator(_steps, json_schema_input_type=Annotated[float, Field(gt=0)] | Auto),
]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class EarlyStopping(_Part):
    """The run ends when the validation loss falls no more; the result is the checkpoint where it was lowest."""

    patience: Annotated[int, _whole(1)] = 3
    "Evaluations in a row without a gain, after which the run ends."
    min_delta: Annotated[float, _real(0)] = 0.0
    "The validation loss has to fall by more than this to count as a gain."


class Hyperparameters(_Part):
    """The numbers of any run; what is `auto` is resolved in `plan.py`, with its reason."""

    n_epochs: Annotated[float | Auto, _real(0, MAX_EPOCHS, above=True, auto=True)] = "auto"
    "Passes over the training file; fractions are allowed."
    max_steps: Annotated[int | None, _whole(1)] = None
    "Optimizer steps, in the place of n_epochs."
    batch_size: Annotated[int | Auto, _whole(1, auto=True)] = "auto"
    "Examples in one optimizer step, over all devices."
    micro_batch_size: Annotated[int | Auto, _whole(1, auto=True)] = "auto"
    "Rows in one forward pass on one device."
    gradient_accumulation_steps: Annotated[int | Auto, _whole(1, auto=True)] = "auto"
    "Forward passes in one optimizer step; batch_size = micro_batch_size x this."
    learning_rate: Annotated[float | Auto, _real(0, above=True, auto=True)] = "auto"
    "The peak rate."
    learning_rate_multiplier: Annotated[float | Auto, _real(0, above=True, auto=True)] = "auto"
    "Times the automatic rate, in the place of learning_rate."
    lr_scheduler: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    "How the rate falls after the warm-up; wsd keeps the peak and falls at the end only."
    decay_ratio: Annotated[float | None, _real(0, 1)] = None
    "Of wsd: the share of the run in which the rate falls; 0.2 where it is not given."
    warmup_ratio: Annotated[float | None, _real(0, 1, below=True)] = None
    "Share of the run in which the rate rises; 0.03 where neither this nor warmup_steps is given."
    warmup_steps: Annotated[int | None, _whole(0)] = None
    "Steps in which the rate rises."
    weight_decay: Annotated[float, _real(0)] = 0.0
    max_grad_norm: Annotated[float, _real(0)] = 1.0
    "Gradients are clipped to this global norm; 0 turns clipping off."
    optimizer: Optimizer = "adamw"
    "8bit: moments in 8 bits (Dettmers et al. 2022); paged: they move to the host's memory where the GPU runs full."
    max_seq_len: Annotated[int | Auto, _whole(8, auto=True)] = "auto"
    "Tokens of the longest row; auto is what the model and the data allow."
    truncation: Literal["error", "drop", "truncate"] = "truncate"
    "What happens to a longer row. A row left with no trained token is dropped and counted. pretrain cuts into pieces."
    eval_steps: Steps = "auto"
    save_steps: Steps = "auto"
    save_total_limit: Annotated[int | Auto, _whole(1, auto=True)] = "auto"
    "Checkpoints that are kept. The newest and the best always are."
    early_stopping: EarlyStopping | None = None
    "Off where it is not given; needs a validation file."

    @model_validator(mode="after")
    def _agree(self) -> Self:
        _not_together(self, "n_epochs", "max_steps")
        _not_together(self, "learning_rate", "learning_rate_multiplier")
        _not_together(self, "warmup_ratio", "warmup_steps")
        if self.decay_ratio is not None and self.lr_scheduler != "wsd":
            raise _at("decay_ratio", f'belongs to lr_scheduler "wsd"; leave it out with "{self.lr_scheduler}"')
        batch, micro, cuts = self.batch_size, self.micro_batch_size, self.gradient_accumulation_steps
        if isinstance(micro, int) and isinstance(batch, int) and batch % micro:
            raise _at("micro_batch_size", f"{micro} does not divide batch_size {batch}")
        if isinstance(cuts, int) and isinstance(batch, int) and batch % cuts:
            raise _at("gradient_accumulation_steps", f"{cuts} does not divide batch_size {batch}")
        whole = isinstance(batch, int) and isinstance(micro, int) and isinstance(cuts, int)
        if whole and batch != micro * cuts:  # type: ignore[operator]
            raise _at(
                "gradient_accumulation_steps",
                f"batch_size {batch} is not micro_batch_size {micro} x gradient_accumulation_steps {cuts}; "
                "leave one of the three out",
            )
        return self


class NextTokenHyperparameters(Hyperparameters):
    packing: Switch = "auto"
    "Several rows in one sequence of up to max_seq_len tokens, none seeing another; batch_size then counts sequences."


class SupervisedHyperparameters(NextTokenHyperparameters):
    train_on: Literal["assistant", "last", "all"] = "assistant"
    "Which tokens carry loss; a message's own weight of 0 or 1 wins."


class PreferenceHyperparameters(Hyperparameters):
    beta: Annotated[float | Auto, _real(0, 2, above=True, auto=True)] = "auto"
    "How strongly the model is held to the base model; auto is 0.1."


class KtoHyperparameters(PreferenceHyperparameters):
    desirable_weight: Annotated[float, _real(0, above=True)] = 1.0
    "Weight of the loss of rows labelled true."
    undesirable_weight: Annotated[float, _real(0, above=True)] = 1.0
    "Weight of the loss of rows labelled false."


class Regex(_Part):
    regex: str


def _targets(value: object) -> object:
    """`all-linear`, a list of module names, or {"regex": ...}."""
    if value == "all-linear":
        return value
    if isinstance(value, list) and value and all(isinstance(name, str) and name for name in value):
        for name in value:
            if re.search(r"[\\*+?^$|()\[\]{}]", name):
                raise _wrong(f'"{name}" is a pattern; patterns are given as {{"regex": "..."}}, not in a list of names')
        return tuple(value)
    if isinstance(value, dict) and set(value) == {"regex"} and isinstance(value["regex"], str):
        if len(value["regex"]) > MAX_REGEX_LENGTH:
            raise _wrong(f"the pattern has {len(value['regex'])} characters; at most {MAX_REGEX_LENGTH} are allowed")
        try:
            re.compile(value["regex"])
        except (re.error, RecursionError, OverflowError) as bad:
            raise _wrong(f"{show(value['regex'])} is not a regular expression: {bad}") from None
        return Regex(regex=value["regex"])
    raise _wrong(f'{show(value)} is not "all-linear", a list of module names, or {{"regex": "..."}}')


Targets = Annotated[
    Literal["all-linear"] | tuple[str, ...] | Regex,
    BeforeValidator(_targets, json_schema_input_type=Literal["all-linear"] | list[str] | Regex),
]


def _names(value: object) -> object:
    if isinstance(value, list) and value and all(isinstance(name, str) and name for name in value):
        return tuple(value)
    raise _wrong(f"{show(value)} is not a list of module names")


def _bits(value: object) -> object:
    if isinstance(value, int) and value in (4, 8):
        return value
    raise _wrong(f"{show(value)} is not 4 or 8")


def _true_or_false(value: object) -> object:
    if isinstance(value, bool):
        return value
    raise _wrong(f"{show(value)} is not true or false")


class Adapter(_Part):
    """What is trained: low-rank adapters (Hu et al. 2021, arXiv:2106.09685), over frozen weights in 4 or 8 bits where
    the type is qlora (Dettmers et al. 2023, arXiv:2305.14314); factors on what layers give (ia3, Liu et al. 2022,
    arXiv:2205.05638); keys and values before the row in each layer (prefix, Li and Liang 2021, arXiv:2101.00190) or
    embeddings before it (prompt, Lester et al. 2021, arXiv:2104.08691); or all weights."""

    type: Literal["lora", "qlora", "ia3", "prefix", "prompt", "full"] = "lora"
    r: Annotated[int, _whole(1, 1024)] = 8
    "Rank of the adapter."
    alpha: Annotated[float, _real(0, above=True)] = 16.0
    "The adapter's output is scaled by alpha / r."
    dropout: Annotated[float, _real(0, 1, below=True)] = 0.0
    target_modules: Targets = "all-linear"
    num_virtual_tokens: Annotated[int, _whole(1, 1024)] = 20
    "How many trained places stand before the row, prefix and prompt only."
    modules_to_save: Annotated[tuple[str, ...], BeforeValidator(_names, json_schema_input_type=list[str])] = ()
    "Modules that are trained whole beside the adapter, such as the output head."
    use_rslora: Annotated[bool, PlainValidator(_true_or_false, json_schema_input_type=bool)] = False
    "Scale by alpha / sqrt(r) in the place of alpha / r (Kalajdzievski 2023, arXiv:2312.03732)."
    use_dora: Annotated[bool, PlainValidator(_true_or_false, json_schema_input_type=bool)] = False
    "Train the length of each output's weights by itself (Liu et al. 2024, arXiv:2402.09353)."
    init: Literal["default", "pissa"] = "default"
    "Where the adapter begins: at zero, or at the principal part of the weights (PiSSA, Meng et al. 2024)."
    lora_plus_ratio: Annotated[float, _real(0, above=True)] = 1.0
    "Rate of the second matrix over that of the first; 16 in LoRA+ (Hayou et al. 2024, arXiv:2402.12354)."
    bits: Annotated[Literal[4, 8], PlainValidator(_bits, json_schema_input_type=Literal[4, 8])] = 4
    "Of a frozen weight, qlora only."
    quant_type: Literal["nf4", "fp4"] = "nf4"
    "How 4 bits are spread: as normally distributed weights are, or as floating point."
    double_quant: Annotated[bool, PlainValidator(_true_or_false, json_schema_input_type=bool)] = True
    "Whether the scales of 4-bit blocks are quantised too: 4.127 bits a weight, else 4.5."

    @model_validator(mode="after")
    def _fields_fit_the_type(self) -> Self:
        for name in sorted(self.model_fields_set - {"type"}):
            if self.type not in _ADAPTER_FIELDS[name]:
                raise _at(name, f'belongs to {_ADAPTER_FIELDS[name][0]}; leave it out with type "{self.type}"')
        if self.init == "pissa" and (self.type == "qlora" or self.use_dora):
            other = "qlora" if self.type == "qlora" else "use_dora"
            raise _at(
                "init", f'"pissa" changes the frozen weights, which {other} does not allow; leave one of the two out'
            )
        if self.bits == 8 and (four := sorted(self.model_fields_set & {"quant_type", "double_quant"})):
            raise _at(four[0], "belongs to 4 bits; leave it out with bits 8")
        return self

    @property
    def is_low_rank(self) -> bool:
        return self.type in ("lora", "qlora")

    def find_unstartable(self) -> str | None:
        """The first field that keeps a job from starting with the weights of another; None where it may."""
        if self.type not in ("lora", "full"):
            return "type"
        plain = Adapter()
        names = ("modules_to_save", "use_rslora", "use_dora", "init")
        return next((name for name in names if getattr(self, name) != getattr(plain, name)), None)

    @property
    def virtual_tokens(self) -> int:
        return self.num_virtual_tokens if self.type in ("prefix", "prompt") else 0


_ADAPTER_FIELDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("r", "alpha", "dropout", "modules_to_save"), ("lora", "qlora")),
    "target_modules": ("lora", "qlora", "ia3"),
    "num_virtual_tokens": ("prefix", "prompt"),
    **dict.fromkeys(("use_rslora", "use_dora", "init", "lora_plus_ratio"), ("lora", "qlora")),
    **dict.fromkeys(("bits", "quant_type", "double_quant"), ("qlora",)),
}
"""The types of adapter that each field belongs to."""


class Stability(_Part):
    """What happens when a step goes wrong: the run ends, the step changes no weights, or the run goes back to its last
    checkpoint with half the learning rate."""

    on_nan: Literal["stop", "skip", "rollback"] = "stop"
    "Where the loss or the gradient is not finite."
    on_spike: Literal["report", "stop", "skip", "rollback"] = "report"
    "Where the loss is far above those of the steps before."
    spike_factor: Annotated[float, _real(1)] = 10.0
    "How far: in standard deviations above the median, both estimated robustly from the last 50 steps."


class Resources(_Part):
    gpus: Annotated[int | Auto, _whole(0, auto=True)] = "auto"
    "GPUs of the job; auto is one where the host has GPUs, else the CPU. 0 asks for the CPU."
    priority: Annotated[int, _whole(-100, 100)] = 0
    "Higher goes first."
    max_attempts: Annotated[int, _whole(1, 20)] = 3
    "How often an attempt that the infrastructure ended is started in all."


class _Supervised(_Part):
    hyperparameters: SupervisedHyperparameters = SupervisedHyperparameters()


class _Dpo(_Part):
    hyperparameters: PreferenceHyperparameters = PreferenceHyperparameters()


class _Kto(_Part):
    hyperparameters: KtoHyperparameters = KtoHyperparameters()


class _Pretrain(_Part):
    hyperparameters: NextTokenHyperparameters = NextTokenHyperparameters()


class Method(_Part):
    """What is learnt from the rows; the numbers stand under the name of the type."""

    type: Literal["supervised", "dpo", "kto", "pretrain"] = "supervised"
    supervised: _Supervised | None = None
    dpo: _Dpo | None = None
    kto: _Kto | None = None
    pretrain: _Pretrain | None = None

    @model_validator(mode="after")
    def _only_its_own(self) -> Self:
        for name in sorted(self.model_fields_set - {"type", self.type}):
            raise _at(name, f'the type of the method is "{self.type}"; set type to "{name}", or leave this out')
        return self

    @property
    def hyperparameters(self) -> Hyperparameters | None:
        given: _Supervised | _Dpo | _Kto | _Pretrain | None = getattr(self, self.type)
        return given.hyperparameters if given else None


def _require_base_behind(method: str, adapter: Adapter) -> None:
    """The reference of a preference method is the base model: what is left when the adapter is switched off."""
    if adapter.type == "full":
        why = f"{method} compares with the base model, which a full fine-tuning changes"
        raise _at("adapter.type", f'{why}; use an adapter, such as type "lora", which can be switched off')
    if adapter.type not in ("lora", "qlora"):
        raise _at("adapter.type", f'{method} is offered with "lora" and "qlora"')
    if adapter.init == "pissa":
        raise _at("adapter.init", f"{method} compares with the base model, which PiSSA takes apart; leave it out")


def _require_startable(spec: "JobSpec") -> None:
    if spec.method.type in ("dpo", "kto"):
        why = f"{spec.method.type} compares with the base model, not with what it starts from"
        raise _at("resume_from", f"not offered yet with {spec.method.type}: {why}; leave it out")
    if field := spec.adapter.find_unstartable():
        value = spec.adapter.model_dump(mode="json")[field]
        raise _at("resume_from", f"not offered yet with adapter.{field} {value}; leave it out")


class JobSpec(_Part):
    """A job as asked. `parse_spec` makes one; `model_dump(exclude_unset=True)` gives the asked body back."""

    spec_version: Literal[1] = 1
    model: Annotated[str, Field(min_length=1, max_length=512)]
    training_file: Annotated[str, Field(min_length=1, max_length=4096)]
    validation_file: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    resume_from: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    "A checkpoint or the result of an earlier job, whose weights this one starts with."
    suffix: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    seed: Annotated[int | None, _whole(0, MAX_SEED)] = None
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
    attention: Literal["auto", "sdpa", "eager"] = "auto"
    stability: Stability = Stability()
    resources: Resources = Resources()

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        place = f"method.{self.method.type}.hyperparameters"
        if self.hyperparameters is not None and (self.method.hyperparameters or self.method.type != "supervised"):
            raise _at("hyperparameters", f"give them in one place: {place}")
        if self.method.type in ("dpo", "kto"):
            _require_base_behind(self.method.type, self.adapter)
        if self.resume_from is not None:
            _require_startable(self)
        if self.suffix is not None and not re.fullmatch(r"[A-Za-z0-9._-]+", self.suffix):
            raise _at("suffix", "letters, digits, dots, hyphens and underscores only: it becomes part of a model name")
        if self.hyper.early_stopping is not None and self.validation_file is None:
            raise _at(
                f"{self.hyperparameters_path}.early_stopping",
                "needs a validation_file, whose loss it goes by; name one",
            )
        return self

    @property
    def hyper(self) -> Hyperparameters:
        """The hyperparameters, from wherever they were given."""
        return self.method.hyperparameters or self.hyperparameters or _HYPERPARAMETERS[self.method.type]()

    @property
    def hyperparameters_path(self) -> str:
        return "hyperparameters" if self.hyperparameters else f"method.{self.method.type}.hyperparameters"

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
