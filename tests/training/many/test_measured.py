"""Bytes that ranks exchange and keep, beside the theory of them (Rajbhandari et al. 2020, sections 3.1 and 7): of full
fine-tuning in fp32 with Adam, where the paper has 16-bit weights and gradients."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from tests.tiny import make_body, make_rows, make_tokenizer, write_rows
from tests.training.many.ranks import Case, on_ranks, train_on_ranks
from training.rundir import EXIT_FINISHED

pytestmark = pytest.mark.timeout(600)

RANKS = 2
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp")
MEASURING = Path(__file__).with_name("measure_all.py")


class Measured:
    """One run of each strategy: of each rank what it exchanged in each step, kept, and took while it wrote."""

    def __init__(self, folder: Path) -> None:
        # Layers are nearly all of it, as in a large model.
        config = LlamaConfig(
            vocab_size=300, hidden_size=256, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=4
        )
        model = LlamaForCausalLM(config)
        self.parameters = sum(weight.numel() for weight in model.parameters())
        model.save_pretrained(folder / "base")
        make_tokenizer().save_pretrained(folder / "base")
        hyper = {"max_steps": 3, "batch_size": 2, "micro_batch_size": 1, "save_steps": 2}
        rows = write_rows(folder / "rows.jsonl", make_rows(6))
        body = make_body(folder / "base", rows, hyper=hyper, adapter={"type": "full"}, gradient_checkpointing=False)
        cases = [Case(folder / strategy, on_ranks(body, RANKS, strategy)) for strategy in STRATEGIES]
        mixture = MixtralForCausalLM(
            MixtralConfig(
                vocab_size=300,
                hidden_size=256,
                intermediate_size=256,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=4,
            )
        )
        self.experts = sum(weight.numel() for name, weight in mixture.named_parameters() if "experts" in name)
        self.rest = sum(weight.numel() for weight in mixture.parameters()) - self.experts
        mixture.save_pretrained(folder / "mixture")
        make_tokenizer().save_pretrained(folder / "mixture")
        parallelism = {"data": RANKS, "expert": RANKS}
        cases.append(Case(folder / "expert", {**body, "model": str(folder / "mixture"), "parallelism": parallelism}))
        assert train_on_ranks(folder, RANKS, cases, MEASURING) == [[EXIT_FINISHED] * RANKS] * len(cases)
        self._of = {
            strategy: [json.loads((folder / strategy / f"measured-{rank}.json").read_text()) for rank in range(RANKS)]
            for strategy in (*STRATEGIES, "expert")
        }

    def of(self, strategy: str, kind: str, at: int) -> list[Any]:
        """Of each rank."""
        return [told[kind][at] for told in self._of[strategy]]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    return Measured(tmp_path_factory.mktemp("measured"))


@pytest.mark.parametrize(
    ("strategy", "parameters"), [("ddp", 2), ("zero1", 2), ("zero2", 2), ("zero3", 3), ("fsdp", 3)]
)
def test_a_step_exchanges_what_theory_says(strategy: str, parameters: float, measured: Measured) -> None:
    """In numbers a rank sends, for each parameter, times (N - 1) / N."""
    share = (RANKS - 1) / RANKS
    for step in (1, 2):
        for sent in measured.of(strategy, "exchanged", step):
            assert sent / (4 * measured.parameters * share) == pytest.approx(parameters, rel=0.05)


@pytest.mark.parametrize(
    ("strategy", "whole", "shared"),
    [("ddp", 16, 0), ("zero1", 4, 16), ("zero2", 4, 16), ("zero3", 4, 20), ("fsdp", 0, 16)],
)
def test_a_rank_keeps_what_the_table_says(strategy: str, whole: int, shared: int, measured: Measured) -> None:
    """Weights, gradients and moments before a step, in bytes for each parameter. By then `zero1` keeps a part of the
    gradients only, as `zero2` does all the time; `zero3` has a buffer, here as large as all of them."""
    for kept in measured.of(strategy, "kept", 2):
        assert kept / measured.parameters == pytest.approx(whole + shared / RANKS, rel=0.1)


@pytest.mark.parametrize("strategy", ["zero3", "fsdp"])
def test_a_checkpoint_is_written_without_a_whole_model_in_memory(strategy: str, measured: Measured) -> None:
    """On rank 0 weights and moments together are 12 bytes a parameter; on the others nothing is gathered to be kept."""
    for taken in measured.of(strategy, "saving", 0):
        assert taken < 1.5 * measured.parameters


def test_of_split_experts_a_rank_keeps_its_share_and_exchanges_no_gradients(measured: Measured) -> None:
    """Gradients of all else are summed over the ranks; tokens are sent instead of those of experts."""
    kept_bytes = 16 * (measured.rest + measured.experts / RANKS)
    for kept, seen in zip(measured.of("expert", "kept", 2), measured.of("expert", "seen", 2), strict=True):
        assert kept == pytest.approx(kept_bytes, rel=0.1)
        assert seen["allreduce"] == pytest.approx(2 * 4 * measured.rest * (RANKS - 1) / RANKS, rel=0.01)
        assert seen["all_to_all_single"] > 0
