"""What may be asked for, and how a wrong body is refused: by the path of the field, with what would be right."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from training.adapter import Adapter
from training.errors import SpecError
from training.spec import (
    JobSpec,
    KtoHyperparameters,
    NextTokenHyperparameters,
    PreferenceHyperparameters,
    SupervisedHyperparameters,
    parse_spec,
)

LEAST = {"model": "tiny", "training_file": "file-1"}
HYPER = "method.supervised.hyperparameters"


def make_hyper(**values: Any) -> dict[str, Any]:
    return {"method": {"type": "supervised", "supervised": {"hyperparameters": values}}}


def refuse(body: object) -> SpecError:
    with pytest.raises(SpecError) as refused:
        parse_spec(body)
    assert refused.value.message.startswith(refused.value.param or "")
    return refused.value


@pytest.mark.parametrize(
    ("more", "param", "words"),
    [
        (make_hyper(learning_rate="2e-4"), f"{HYPER}.learning_rate", '"2e-4" (text) is not a number'),
        (make_hyper(learning_rate=math.inf), f"{HYPER}.learning_rate", "inf is not a number"),
        (make_hyper(learning_rate=math.nan), f"{HYPER}.learning_rate", "nan is not a number"),
        (make_hyper(n_epochs=0), f"{HYPER}.n_epochs", "above 0 and up to 10000"),
        (make_hyper(n_epochs=1e308), f"{HYPER}.n_epochs", "up to 10000"),
        (make_hyper(batch_size=10**400), f"{HYPER}.batch_size", "a number of about 398 digits"),
        (make_hyper(max_steps=10**18), f"{HYPER}.max_steps", "at most 1,000,000,000"),
        (make_hyper(save_steps=10**400), f"{HYPER}.save_steps", "a number of about 398 digits"),
        ({"seed": 10**400}, "seed", "from 0 to 2147483647"),
        ({"adapter": {"alpha": 10**400}}, "adapter.alpha", "at most"),
        ({"adapter": {"target_modules": {"regex": "(" * 900}}}, "adapter.target_modules", "not a regular expression"),
        ({"adapter": {"target_modules": {"regex": "a{99999999999}"}}}, "adapter.target_modules", "too large"),
        ({"adapter": {"target_modules": {"regex": "a" * 1001}}}, "adapter.target_modules", "at most 1000"),
        (make_hyper(n_epochs=True), f"{HYPER}.n_epochs", "True (a boolean)"),
        (make_hyper(batch_size=2.5), f"{HYPER}.batch_size", "a whole number of at least 1"),
        (make_hyper(batch_size=4, micro_batch_size=3), f"{HYPER}.micro_batch_size", "3 does not divide batch_size 4"),
        (
            make_hyper(batch_size=8, micro_batch_size=2, gradient_accumulation_steps=2),
            f"{HYPER}.gradient_accumulation_steps",
            "8 is not micro_batch_size 2 x gradient_accumulation_steps 2",
        ),
        (make_hyper(n_epochs=1, max_steps=5), f"{HYPER}.max_steps", "not together with n_epochs"),
        (
            make_hyper(learning_rate=1e-4, learning_rate_multiplier=2),
            f"{HYPER}.learning_rate_multiplier",
            "not together",
        ),
        (make_hyper(warmup_ratio=1), f"{HYPER}.warmup_ratio", "from 0 to below 1"),
        (make_hyper(warmup_ratio=0.1, warmup_steps=1), f"{HYPER}.warmup_steps", "not together"),
        (make_hyper(max_seq_len=7), f"{HYPER}.max_seq_len", "at least 8"),
        (make_hyper(truncation="cut"), f"{HYPER}.truncation", 'not one of "error", "drop" or "truncate"'),
        (make_hyper(save_steps=1.5), f"{HYPER}.save_steps", "share of the run"),
        (make_hyper(epochs=3), f"{HYPER}.epochs", 'unknown field; did you mean "n_epochs"?'),
        ({"hyperparameters": {"n_epochs": "3"}}, "hyperparameters.n_epochs", '"3" (text)'),
        ({"hyperparameters": {}, **make_hyper()}, "hyperparameters", "in one place"),
        ({"adapter": {"r": 0}}, "adapter.r", "from 1 to 1024"),
        ({"adapter": {"r": True}}, "adapter.r", "a boolean"),
        ({"adapter": {"alpha": 0}}, "adapter.alpha", "greater than 0"),
        ({"adapter": {"dropout": 1}}, "adapter.dropout", "below 1"),
        ({"adapter": {"target_modules": [".*q_proj"]}}, "adapter.target_modules", '{"regex": "..."}'),
        ({"adapter": {"target_modules": {"regex": "("}}}, "adapter.target_modules", "not a regular expression"),
        ({"adapter": {"target_modules": []}}, "adapter.target_modules", "a list of module names"),
        ({"adapter": {"type": "full", "r": 4}}, "adapter.r", "belongs to lora"),
        ({"seed": 2**31}, "seed", "from 0 to 2147483647"),
        ({"suffix": "x" * 65}, "suffix", "at most 64"),
        ({"suffix": "a/b"}, "suffix", "letters, digits"),
        ({"metadata": {"a": 1}}, "metadata.a", "not text"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata", "at most 16"),
        ({"metadata": {"a": "\0"}}, "metadata.a", "NUL"),
        ({"metadata": {"a": "\ud800"}}, "metadata.a", "surrogate"),
        ({"gradient_checkpointing": "yes"}, "gradient_checkpointing", "true or false"),
        ({"resources": {"gpu": 1}}, "resources.gpu", 'did you mean "gpus"?'),
        ({"model": 3}, "model", "not text"),
        ({"modle": "x"}, "modle", 'did you mean "model"?'),
    ],
)
def test_a_wrong_field_is_refused_by_its_path(more: dict[str, Any], param: str, words: str) -> None:
    error = refuse({**LEAST, **more})
    assert error.param == param
    assert words in error.message


@pytest.mark.parametrize("body", [None, [], "x", 3])
def test_a_body_that_is_no_object_is_refused(body: object) -> None:
    assert refuse(body).code == "invalid_body"


def test_a_missing_field_is_named() -> None:
    assert (refuse({"model": "tiny"}).param, refuse({"model": "tiny"}).code) == ("training_file", "missing_field")


def test_nulls_mean_not_given() -> None:
    names = ("suffix", "seed", "validation_file", "metadata", "method", "hyperparameters", "adapter", "precision")
    assert parse_spec({**LEAST, **dict.fromkeys(names)}).asked() == LEAST
    assert parse_spec({**LEAST, **make_hyper(n_epochs=None, batch_size=2)}).hyper.batch_size == 2


def test_what_was_asked_comes_back_as_it_was() -> None:
    body = {
        **LEAST,
        **make_hyper(n_epochs="auto", learning_rate=2e-4, save_steps=0.1),
        "adapter": {"r": 4, "target_modules": {"regex": ".*q_proj"}},
        "metadata": {"team": "ü"},
    }
    assert json.loads(json.dumps(parse_spec(body).asked())) == body
    assert parse_spec(parse_spec(body).asked()) == parse_spec(body)


def test_the_old_place_of_hyperparameters_is_read() -> None:
    assert parse_spec({**LEAST, "hyperparameters": {"n_epochs": 2}}).hyper.n_epochs == 2


def test_a_spec_cannot_be_changed() -> None:
    with pytest.raises(Exception, match="frozen"):
        parse_spec(LEAST).model = "other"  # type: ignore[misc]


def test_every_field_of_the_schema_is_documented_by_its_limits() -> None:
    schema = JobSpec.model_json_schema()
    assert set(schema["properties"]) == set(JobSpec.model_fields)
    for kind in (NextTokenHyperparameters, SupervisedHyperparameters, PreferenceHyperparameters, KtoHyperparameters):
        hyper = schema["$defs"][kind.__name__]["properties"]
        assert set(hyper) == set(kind.model_fields)
    assert hyper["batch_size"]["anyOf"][0] == {"minimum": 1, "type": "integer"}
    assert set(schema["$defs"]["Adapter"]["properties"]) == set(Adapter.model_fields)


def test_the_smallest_spec_of_the_readme_is_one(tmp_path: Path) -> None:
    assert parse_spec({**LEAST, "adapter": {"r": 8}}).adapter.alpha == 16
