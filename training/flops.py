"""How much a run computes: floating-point operations (FLOPs), counted from formulas and not measured.

A product of a token with a matrix of n weights takes 2n, the gradients of its input and of its weights 2n each (Kaplan
et al. 2020, section 2.1). So a token takes 2N forward and 6N in full fine-tuning; 4N with adapters, whose base needs no
gradient of its weights. Attention comes on top: queries with keys and weights with values, twice that backward. Norms,
activations, the softmax and the optimizer are next to nothing beside it and left out, as is usual (PaLM, Chowdhery et
al. 2022, appendix B); so is what kernels compute again within themselves.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from training.adapter import Adapter
from training.facts import DataFacts, Fact, Matmuls, ModelFacts
from training.spec import JobSpec

COMPUTE_OPTIMAL_TOKENS_PER_PARAMETER = 20.0
"""Tokens a parameter where a training from scratch is best for its FLOPs (Chinchilla, Hoffmann et al. 2022, table 3);
beside it stands how much a fine-tune sees."""


class Compute(Fact):
    """A forecast of what the whole run computes, and how fast its device could be."""

    tokens: int = 0
    "Of all rows in all epochs."
    flops: float = 0.0
    tokens_per_parameter: float = 0.0
    optimal_tokens_per_parameter: float = COMPUTE_OPTIMAL_TOKENS_PER_PARAMETER
    peak_flops_per_s: float | None = None
    "Of the device in the run's precision; None where it is not known."


@dataclass(frozen=True)
class Load:
    """What goes through the model in some passes. A pair is a query with a key: `pairs` are those that the kernel
    computes, `causal_pairs` those that count, each place with what stands before it in its own row."""

    passes: float
    tokens: float
    labelled: float
    "Places whose logits are computed."
    pairs: float
    causal_pairs: float

    def __add__(self, other: "Load") -> "Load":
        return Load(*(one + two for one, two in zip(self.__dict__.values(), other.__dict__.values(), strict=True)))


NOTHING = Load(0, 0, 0, 0, 0)


@dataclass(frozen=True)
class Work:
    """`done`: the FLOPs that are computed. `needed`: those that the model asks for, without what is computed twice
    (checkpointing) or for nothing (masked attention); MFU is made of these (PaLM, appendix B)."""

    done: float
    needed: float

    def __add__(self, other: "Work") -> "Work":
        return Work(self.done + other.done, self.needed + other.needed)


def make_load(lengths: Iterable[int], labelled: int, attention: str, *, prefix: int = 0, prompt: int = 0) -> Load:
    """One pass over rows of these lengths, laid end to end; `prefix` keys or `prompt` tokens stand before them.

    Fused attention leaves out what is masked: the half of each row's square. Eager attention computes the square of
    the whole pass, and fused attention too where it is given a mask, for a prefix.
    """
    rows = list(lengths)
    tokens = sum(rows) + prompt
    causal = sum((length + prompt) ** 2 / 2 + length * prefix for length in rows)
    halved = attention != "eager" and not prefix
    return Load(1, tokens, labelled, causal if halved else tokens * (tokens + prefix), causal)


def count_forward(matmuls: Matmuls, load: Load, *, adapted: bool = True) -> Work:
    """A pass without gradients; not `adapted`, through the base alone."""
    body = matmuls.body + (matmuls.adapter if adapted else 0)
    once = _per_pass(matmuls) * load.passes if adapted else 0
    products = 2 * body * load.tokens + 2 * matmuls.head * _head_places(matmuls, load) + once
    return Work(products + _attention(matmuls, load.pairs), products + _attention(matmuls, load.causal_pairs))


def count_training(matmuls: Matmuls, load: Load, *, checkpointing: bool) -> Work:
    """A pass and its gradients: of every input that a trained weight stands before, and of the trained weights.

    With checkpointing the body's forward pass is made again, but for products whose result no gradient needs; PyTorch
    then lets gradients flow back to the embeddings, so nothing is saved in the lower layers.
    """
    forward = count_forward(matmuls, load)
    head = 2 * (matmuls.head + matmuls.trained_head) * _head_places(matmuls, load)
    both = 2 * (matmuls.body + matmuls.trained_body + 2 * matmuls.adapter) * load.tokens + head
    both += 4 * matmuls.adapter_sums * load.passes
    saved = 2 * matmuls.untouched * load.tokens
    width = matmuls.attention - matmuls.untouched_attention
    needed = forward.needed + both - saved + 8 * width * load.causal_pairs
    if not checkpointing:
        return Work(forward.done + both - saved + 8 * width * load.pairs, needed)
    again = 2 * (matmuls.body + matmuls.adapter - matmuls.not_again) * load.tokens
    again += _per_pass(matmuls) * load.passes + _attention(matmuls, load.pairs)
    return Work(forward.done + both + 8 * matmuls.attention * load.pairs + again, needed)


def _per_pass(matmuls: Matmuls) -> float:
    """What adapters compute once a pass, however many tokens it has; peft makes a sum twice."""
    return 2 * matmuls.adapter_norms + 4 * matmuls.adapter_sums


def count_references(method: str, matmuls: Matmuls, rows: Load, others: Load, others_adapted: Load) -> Work:
    """What dpo and kto compute beside the trained passes, without gradients: the base on the same rows, and for kto
    base and model on `others`, each prompt with another row's answer."""
    if method not in ("dpo", "kto"):
        return Work(0, 0)
    base = count_forward(matmuls, rows, adapted=False)
    if method == "dpo":
        return base
    return base + count_forward(matmuls, others, adapted=False) + count_forward(matmuls, others_adapted)


def forecast_compute(
    spec: JobSpec,
    model: ModelFacts,
    data: DataFacts,
    *,
    epochs: float,
    micro_batch_size: int,
    attention: str,
    checkpointing: bool,
    peak_flops_per_s: float | None,
) -> Compute:
    prefix, prompt = virtual_places(spec.adapter)
    base = forecast_load(data, micro_batch_size, attention)
    load = forecast_load(data, micro_batch_size, attention, prefix=prefix, prompt=prompt)
    epoch = count_training(model.matmuls, load, checkpointing=checkpointing)
    epoch += count_references(spec.method.type, model.matmuls, base, base, load)
    tokens = round(data.tokens * epochs)
    return Compute(
        tokens=tokens,
        flops=epoch.done * epochs,
        tokens_per_parameter=tokens_per_parameter(tokens, model.parameters),
        peak_flops_per_s=peak_flops_per_s,
    )


def forecast_load(data: DataFacts, micro_batch_size: int, attention: str, *, prefix: int = 0, prompt: int = 0) -> Load:
    """Of an epoch. Which rows share a pass is left to chance: of n sequences of mean length m and mean square q, k to a
    pass, the square of a pass is k q + k (k - 1) m^2 in the mean."""
    count, tokens = data.sequences, data.used_tokens + data.sequences * prompt
    squares = data.squared_tokens + 2 * prompt * data.used_tokens + count * prompt**2
    causal = data.squared_row_tokens / 2 + prompt * data.used_tokens + count * prompt**2 / 2 + prefix * data.used_tokens
    if attention != "eager" and not prefix:
        pairs = causal
    else:
        pairs = squares + prefix * tokens
        if count:
            pairs += (micro_batch_size - 1) * tokens**2 / count
    return Load(count / micro_batch_size, tokens, data.trained_tokens, pairs, causal)


def virtual_places(adapter: Adapter) -> tuple[int, int]:
    """Trained keys before a row, and trained tokens before it."""
    count = adapter.virtual_tokens
    return (count, 0) if adapter.type == "prefix" else (0, count)


def tokens_per_parameter(tokens: float, parameters: int) -> float:
    return tokens / parameters if parameters else 0.0


def _head_places(matmuls: Matmuls, load: Load) -> float:
    return load.tokens if matmuls.head_everywhere else load.labelled


def _attention(matmuls: Matmuls, pairs: float) -> float:
    """Two products of a head's width for each pair and head, and two operations in each place of them."""
    return 4 * matmuls.attention * pairs
