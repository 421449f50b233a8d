"""What of a model is trained: the `adapter` of a job."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, PlainValidator, model_validator

from training.fields import Part, at, real, show, true_or_false, whole, wrong

MAX_REGEX_LENGTH = 1000


class Regex(Part):
    regex: str


def _targets(value: object) -> object:
    """`all-linear`, a list of module names, or {"regex": ...}."""
    if value == "all-linear":
        return value
    if isinstance(value, list) and value and all(isinstance(name, str) and name for name in value):
        for name in value:
            if re.search(r"[\\*+?^$|()\[\]{}]", name):
                raise wrong(f'"{name}" is a pattern; patterns are given as {{"regex": "..."}}, not in a list of names')
        return tuple(value)
    if isinstance(value, dict) and set(value) == {"regex"} and isinstance(value["regex"], str):
        if len(value["regex"]) > MAX_REGEX_LENGTH:
            raise wrong(f"the pattern has {len(value['regex'])} characters; at most {MAX_REGEX_LENGTH} are allowed")
        try:
            re.compile(value["regex"])
        except (re.error, RecursionError, OverflowError) as bad:
            raise wrong(f"{show(value['regex'])} is not a regular expression: {bad}") from None
        return Regex(regex=value["regex"])
    raise wrong(f'{show(value)} is not "all-linear", a list of module names, or {{"regex": "..."}}')


Targets = Annotated[
    Literal["all-linear"] | tuple[str, ...] | Regex,
    BeforeValidator(_targets, json_schema_input_type=Literal["all-linear"] | list[str] | Regex),
]


def _names(value: object) -> object:
    if isinstance(value, list) and value and all(isinstance(name, str) and name for name in value):
        return tuple(value)
    raise wrong(f"{show(value)} is not a list of module names")


def _bits(value: object) -> object:
    if isinstance(value, int) and value in (4, 8):
        return value
    raise wrong(f"{show(value)} is not 4 or 8")


class Adapter(Part):
    """What is trained: low-rank adapters (Hu et al. 2021, arXiv:2106.09685), over frozen weights in 4 or 8 bits where
    the type is qlora (Dettmers et al. 2023, arXiv:2305.14314); factors on what layers give (ia3, Liu et al. 2022,
    arXiv:2205.05638); keys and values before the row in each layer (prefix, Li and Liang 2021, arXiv:2101.00190) or
    embeddings before it (prompt, Lester et al. 2021, arXiv:2104.08691); or all weights."""

    type: Literal["lora", "qlora", "ia3", "prefix", "prompt", "full"] = "lora"
    r: Annotated[int, whole(1, 1024)] = 8
    "Rank of the adapter."
    alpha: Annotated[float, real(0, above=True)] = 16.0
    "The adapter's output is scaled by alpha / r."
    dropout: Annotated[float, real(0, 1, below=True)] = 0.0
    target_modules: Targets = "all-linear"
    num_virtual_tokens: Annotated[int, whole(1, 1024)] = 20
    "How many trained places stand before the row, prefix and prompt only."
    modules_to_save: Annotated[tuple[str, ...], BeforeValidator(_names, json_schema_input_type=list[str])] = ()
    "Modules that are trained whole beside the adapter, such as the output head."
    use_rslora: Annotated[bool, PlainValidator(true_or_false, json_schema_input_type=bool)] = False
    "Scale by alpha / sqrt(r) in the place of alpha / r (Kalajdzievski 2023, arXiv:2312.03732)."
    use_dora: Annotated[bool, PlainValidator(true_or_false, json_schema_input_type=bool)] = False
    "Train the length of each output's weights by itself (Liu et al. 2024, arXiv:2402.09353)."
    init: Literal["default", "pissa"] = "default"
    "Where the adapter begins: at zero, or at the principal part of the weights (PiSSA, Meng et al. 2024)."
    lora_plus_ratio: Annotated[float, real(0, above=True)] = 1.0
    "Rate of the second matrix over that of the first; 16 in LoRA+ (Hayou et al. 2024, arXiv:2402.12354)."
    bits: Annotated[Literal[4, 8], PlainValidator(_bits, json_schema_input_type=Literal[4, 8])] = 4
    "Of a frozen weight, qlora only."
    quant_type: Literal["nf4", "fp4"] = "nf4"
    "How 4 bits are spread: as normally distributed weights are, or as floating point."
    double_quant: Annotated[bool, PlainValidator(true_or_false, json_schema_input_type=bool)] = True
    "Whether the scales of 4-bit blocks are quantised too: 4.127 bits a weight, else 4.5."

    @model_validator(mode="after")
    def _fields_fit_the_type(self) -> Self:
        for name in sorted(self.model_fields_set - {"type"}):
            if self.type not in _ADAPTER_FIELDS[name]:
                raise at(name, f'belongs to {_ADAPTER_FIELDS[name][0]}; leave it out with type "{self.type}"')
        if self.init == "pissa" and (self.type == "qlora" or self.use_dora):
            other = "qlora" if self.type == "qlora" else "use_dora"
            raise at(
                "init", f'"pissa" changes the frozen weights, which {other} does not allow; leave one of the two out'
            )
        if self.bits == 8 and (four := sorted(self.model_fields_set & {"quant_type", "double_quant"})):
            raise at(four[0], "belongs to 4 bits; leave it out with bits 8")
        return self

    @property
    def is_low_rank(self) -> bool:
        return self.type in ("lora", "qlora")

    @property
    def shape(self) -> dict[str, Any]:
        """The fields that two adapters have to share for the weights of one to fit the other, as JSON. A low-rank one
        fits a quantised base as well as a plain one."""
        fields = self.model_dump(mode="json", include=set(_SHAPE))
        return {name: "lora" if fields[name] == "qlora" else fields[name] for name in _SHAPE}

    @property
    def virtual_tokens(self) -> int:
        return self.num_virtual_tokens if self.type in ("prefix", "prompt") else 0


_SHAPE = (
    *("type", "r", "alpha", "target_modules", "num_virtual_tokens"),
    *("modules_to_save", "use_rslora", "use_dora"),
)

_ADAPTER_FIELDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("r", "alpha", "dropout", "modules_to_save"), ("lora", "qlora")),
    "target_modules": ("lora", "qlora", "ia3"),
    "num_virtual_tokens": ("prefix", "prompt"),
    **dict.fromkeys(("use_rslora", "use_dora", "init", "lora_plus_ratio"), ("lora", "qlora")),
    **dict.fromkeys(("bits", "quant_type", "double_quant"), ("qlora",)),
}
"""The types of adapter that each field belongs to."""
