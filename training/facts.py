"""What the plan has to know of a model and of the data."""

from pydantic import BaseModel, ConfigDict


class Fact(BaseModel):
    model_config = ConfigDict(frozen=True)


class ModelFacts(Fact):
    """What the plan has to know of the base model; `*_parameters` are counts."""

    family: str
    hidden_size: int
    intermediate_size: int
    layers: int
    vocabulary: int
    parameters: int
    trained_parameters: int
    quantised_parameters: int = 0
    "Of the frozen ones, those that are kept in 4 or 8 bits."
    head_in_parts: bool = True
    "Whether logits are what the output head gives, and so can be made some at a time."
    context_tokens: int | None
    attention_heads: int = 0
    has_fused_attention: bool = True
    "Whether transformers has PyTorch's fused attention for this family."
    stacked_parameters: int = 0
    "Of the frozen ones, experts in stacks that have adapters: peft computes their sum with the adapter in each pass."


class Counts(Fact):
    """Rows of the training file. `dropped` holds those without a trained token too, which `masked` counts alone."""

    rows: int
    trained_rows: int
    truncated: int = 0
    dropped: int = 0
    masked: int = 0
    desirable: int | None = None
    "Of the trained rows, those labelled true; None where labels are not read."
    undesirable: int | None = None


class DataFacts(Fact):
    """What the plan has to know of the data: `longest_tokens` and `longest_trained_tokens` are of one sequence.

    `examples` are what a batch is made of: rows, pairs of them, pieces of long texts, or several rows in one sequence.
    """

    counts: Counts
    examples: int
    longest_tokens: int
    longest_trained_tokens: int
    tokens: int
    trained_tokens: int
    validation_rows: int = 0
