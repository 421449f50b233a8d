"""Checks of the fields of a spec, each with an error that says what was given and what would be right."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator
from pydantic_core import PydanticCustomError

Auto = Literal["auto"]

MAX_NUMBER = 10**9
"""What no number of a job is beyond; larger ones are slips, and would occupy a machine."""


def show(value: object) -> str:
    """A value as a person would name it in an error: its text, and its kind where that is the fault."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of about {value.bit_length() * 3 // 10} digits"
    kinds: dict[type, str] = {bool: "a boolean", str: "text", dict: "an object", list: "a list"}
    kind = kinds.get(type(value))
    text = repr(value) if not isinstance(value, str) else f'"{value}"'
    text = text if len(text) <= 80 else text[:77] + "..."
    return f"{text} ({kind})" if kind else text


def wrong(message: str) -> PydanticCustomError:
    return PydanticCustomError("burnish", "{message}", {"message": message})


def not_together(part: BaseModel, first: str, second: str) -> None:
    given = part.model_fields_set
    if {first, second} <= given and "auto" not in (getattr(part, first), getattr(part, second)):
        raise at(second, f"not together with {first}; leave one of the two out")


def at(field: str, message: str, code: str = "invalid_value") -> PydanticCustomError:
    """An error of a whole object that belongs to one of its fields."""
    return PydanticCustomError("burnish", "{message}", {"message": message, "field": field, "code": code})


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
            raise wrong(f"{show(value)} is not {wanted}")
        # Limits first: no whole number is too large to be compared, but many are for a float.
        if not low <= value <= high or (above and value <= low):
            limit = f"; at most {high:,}" if high == MAX_NUMBER and value > high else ""
            raise wrong(f"{show(value)} is not {wanted}{limit}")
        if below and value >= high:
            raise wrong(f"{show(value)} is not {wanted}")
        return kind(value)

    schema: Any = Annotated[kind, Field(gt=low) if above else Field(ge=low)]
    return PlainValidator(check, json_schema_input_type=schema | Auto if auto else schema)


def whole(low: int, high: float = MAX_NUMBER, *, auto: bool = False) -> PlainValidator:
    return _number(int, low, high, auto=auto)


def real(
    low: float, high: float = MAX_NUMBER, *, above: bool = False, auto: bool = False, below: bool = False
) -> PlainValidator:
    return _number(float, low, high, above=above, auto=auto, below=below)


def _steps(value: object) -> object:
    """`auto`, a number of steps, or a share of the run in (0, 1)."""
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_NUMBER):
        return value
    if isinstance(value, float) and (0 < value < 1 or (1 <= value <= MAX_NUMBER and value.is_integer())):
        return value if value < 1 else int(value)
    raise wrong(f'{show(value)} is not "auto", a whole number of steps of at least 1, or a share of the run in (0, 1)')


def _switch(value: object) -> object:
    if value == "auto" or isinstance(value, bool):
        return value
    raise wrong(f'{show(value)} is not "auto", true or false')


Switch = Annotated[bool | Auto, PlainValidator(_switch, json_schema_input_type=bool | Auto)]

Steps = Annotated[
    int | float | Auto,
    PlainValidator(_steps, json_schema_input_type=Annotated[float, Field(gt=0)] | Auto),
]


def true_or_false(value: object) -> object:
    if isinstance(value, bool):
        return value
    raise wrong(f"{show(value)} is not true or false")


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
