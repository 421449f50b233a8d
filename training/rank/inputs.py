"""What a run is made from: spec, base model, tokenizer and rows, and what the plan has to know of them."""

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from training.automatic import make_beta
from training.errors import DataError
from training.extending import make_lasting
from training.facts import DataFacts
from training.plan import make_max_seq_len
from training.rank.data import Prepared, sequences_of
from training.rank.dpo import Dpo
from training.rank.kto import Kto
from training.rank.loss import count_tokens, count_trained
from training.rank.model import context_tokens, load_config, load_tokenizer
from training.rank.objective import Objective
from training.rank.packing import Pack, pack
from training.rank.source import Source, find_source, list_tokenizer_files
from training.rank.start import Start, find_start
from training.rank.supervised import Pretrain, Supervised
from training.rank.workload import used_tokens
from training.rundir import file_sha256
from training.spec import (
    JobSpec,
    KtoHyperparameters,
    NextTokenHyperparameters,
    PreferenceHyperparameters,
    SupervisedHyperparameters,
)

PATHS = {"model", "training_file", "validation_file", "resume_from"}
"""Of these the content counts, not where they lie."""


@dataclass(frozen=True)
class Inputs:
    spec: JobSpec
    source: Source
    config: Any
    tokenizer: Any
    objective: Objective
    training: Prepared
    validation: Prepared | None
    start: Start | None

    @cached_property
    def fingerprint(self) -> str:
        """A digest of everything that decides what a run comes to, wherever it runs: a checkpoint fits only its own
        run. All files are read for it."""
        spec = self.spec
        files = [spec.training_file, *([spec.validation_file] if spec.validation_file else [])]
        parts = [
            {name: value for name, value in make_lasting(spec).items() if name not in PATHS},
            self.source.digest,
            [file_sha256(file) for file in list_tokenizer_files(self.source.folder)],
            [file_sha256(Path(file)) for file in files],
            *([self.start.digest] if self.start else []),
        ]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def load_inputs(spec: JobSpec, *, base_name: str | None = None, weights: bool) -> Inputs:
    """Raises ModelError, DataError and SpecError."""
    source = find_source(spec.model, weights=weights)
    source = replace(source, name=base_name) if base_name is not None else source
    config, tokenizer = load_config(source), load_tokenizer(source)
    start = find_start(spec, source)
    limit = make_max_seq_len(spec, context_tokens(config))
    objective = make_objective(spec)
    training = _prepare(objective, "training_file", spec.training_file, tokenizer, limit)
    validation = None
    if spec.validation_file is not None:
        validation = _prepare(objective, "validation_file", spec.validation_file, tokenizer, limit)
    if isinstance(spec.hyper, NextTokenHyperparameters) and spec.hyper.packing is True:
        training = pack(training, spec, context_tokens(config))
    return Inputs(spec, source, config, tokenizer, objective, training, validation, start)


def make_objective(spec: JobSpec) -> Objective:
    asked = spec.hyper
    if isinstance(asked, KtoHyperparameters):
        return Kto(asked.truncation, make_beta(asked), asked.desirable_weight, asked.undesirable_weight)
    if isinstance(asked, PreferenceHyperparameters):
        return Dpo(asked.truncation, make_beta(asked))
    if isinstance(asked, SupervisedHyperparameters):
        return Supervised(asked.truncation, asked.train_on)
    return Pretrain(asked.truncation)


def make_data_facts(inputs: Inputs) -> DataFacts:
    examples = inputs.training.examples
    rows = sequences_of(examples)
    # What is packed is one sequence; the sides of a pair are two.
    packed = [example.sequences for example in examples if isinstance(example, Pack)]
    sequences = packed or [(row,) for row in rows]
    used = [used_tokens(row) for row in rows]
    return DataFacts(
        counts=inputs.training.counts,
        examples=len(examples),
        longest_tokens=max(count_tokens(sequence) for sequence in sequences),
        longest_trained_tokens=max(count_trained(sequence) for sequence in sequences),
        tokens=count_tokens(rows),
        trained_tokens=count_trained(rows),
        validation_rows=len(inputs.validation.examples) if inputs.validation else 0,
        sequences=len(sequences),
        used_tokens=sum(used),
        squared_tokens=sum(sum(map(used_tokens, sequence)) ** 2 for sequence in sequences),
        squared_row_tokens=sum(length**2 for length in used),
    )


def _prepare(objective: Objective, param: str, file: str, tokenizer: Any, max_seq_len: int) -> Prepared:
    try:
        return objective.prepare(Path(file), tokenizer, max_seq_len)
    except FileNotFoundError:
        raise DataError(f"{param}: {file}: no such file", param=param) from None
    except IsADirectoryError:
        raise DataError(f"{param}: {file} is a folder; name a file of JSON lines", param=param) from None
    except DataError as error:
        error.param = error.param or param
        raise
