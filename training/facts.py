"""What the plan has to know of a model and of the data."""

from pydantic import BaseModel, ConfigDict


class Fact(BaseModel):
    model_config = ConfigDict(frozen=True)


class Matmuls(Fact):
    """The weights that a token is multiplied by on its way through the model, which is what FLOPs are counted from.

    Embeddings are looked up and do not count; of experts (MoE) those count that a token goes through.
    """

    body: int = 0
    "Of all layers but the output head."
    head: int = 0
    head_everywhere: bool = False
    "Whether the model computes logits for all places, as one does that cannot be told which are wanted."
    attention: int = 0
    "Heads x head size, summed over the layers with attention."
    adapter: int = 0
    "Of the low-rank matrices."
    adapter_norms: int = 0
    "Of DoRA: the products that the lengths of its weights take, once a pass and not once a token."
    adapter_sums: int = 0
    "Of experts in stacks: the adapter's matrices multiplied, once a pass, since peft adds them to the weights first."
    trained_body: int = 0
    "Of the body those that have a gradient of their own."
    trained_head: int = 0
    untouched: int = 0
    "Of body and adapter those that stand before everything trained: their inputs have no gradient."
    untouched_attention: int = 0
    not_again: int = 0
    "Of body and adapter those whose result no gradient needs: checkpointing does not compute them again."


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
    attends_to_all: bool = True
    "Whether every layer attends to all that stands before a place, and not to a window of it."
    stacked_parameters: int = 0
    "Of the frozen ones, experts in stacks that have adapters: peft computes their sum with the adapter in each pass."
    tensor_units: int = 1
    "The ranks that its matrices may be split among are numbers that divide this."
    whole_parameters: int = 0
    "Those that are whole on all of these ranks."
    experts: int = 0
    "Of each layer; 0 where there are none that can be split among ranks."
    expert_parameters: int = 0
    trained_expert_parameters: int = 0
    "Of the trained ones, those of experts and of their adapters."
    matmuls: Matmuls = Matmuls()


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
    sequences: int = 0
    "What goes through the model by itself where a pass takes one: rows, sides of pairs, or packs."
    used_tokens: int = 0
    "Up to the last trained token of each row: what follows it is never computed."
    squared_tokens: int = 0
    "The sum of the squares of the used tokens of each sequence."
    squared_row_tokens: int = 0
    "The same of each row."
