"""A job that starts with the weights of an earlier one: those weights bit for bit, all else new."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model_state_dict
from preferences import make_adapted
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_runs import StopAtCheck, curve_of, events_of, last_event, make_job, same_weights, train_here, weights_of

from tests.tiny import make_model, make_tokenizer, save_model
from training.errors import SpecError
from training.rank.source import find_source
from training.rank.weights import ADAPTER_WEIGHTS, save_weights
from training.rundir import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, read_json, write_json
from training.spec import parse_spec

ADAPTERS: dict[str, dict[str, Any]] = {"adapter": {"r": 4}, "model": {"type": "full"}}
KINDS: dict[str, dict[str, Any]] = {
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "head": {"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]},
    "embeddings": {"modules_to_save": ["embed_tokens", "norm"]},
    "qlora": {"type": "qlora"},
    "qlora, 8 bits": {"type": "qlora", "bits": 8},
    "qlora, dora, head": {"type": "qlora", "use_dora": True, "modules_to_save": ["lm_head"]},
    "ia3": {"type": "ia3"},
    "prefix": {"type": "prefix", "num_virtual_tokens": 5},
    "prompt": {"type": "prompt", "num_virtual_tokens": 5},
}
HYPER = {"warmup_steps": 0, "lr_scheduler": "constant", "save_steps": 2, "eval_steps": 2}


@pytest.fixture(scope="module", params=ADAPTERS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def earlier(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, in a folder with its base and its rows."""
    folder = tmp_path_factory.mktemp("earlier")
    assert train_here(folder / "run", make_job(folder, hyper=HYPER, adapter=ADAPTERS[kind])) == EXIT_FINISHED
    return folder / "run"


def job_from(earlier: Path, kind: str, start: Path, **more: Any) -> dict[str, Any]:
    hyper = {**HYPER, **more.pop("hyper", {})}
    return make_job(earlier.parent, hyper=hyper, **{"adapter": ADAPTERS[kind], "resume_from": str(start), **more})


def failure_of(path: Path, body: dict[str, Any]) -> dict[str, Any]:
    assert train_here(path, body) == EXIT_FAILED
    assert last_event(path).data["param"] == "resume_from"
    return last_event(path).data


@pytest.mark.parametrize("place", ["checkpoint", "run", "result"])
def test_it_begins_with_the_weights_and_a_fresh_optimizer(place: str, kind: str, earlier: Path, tmp_path: Path) -> None:
    """The rate is so small that its first step changes nothing that fp32 holds; Adam's first step has moments of its
    own gradient alone."""
    last = earlier / "checkpoints" / "step-00000006"
    start = {"checkpoint": last, "run": earlier, "result": earlier / kind}[place]
    body = job_from(earlier, kind, start, hyper={"max_steps": 1, "n_epochs": "auto", "learning_rate": 1e-30})
    assert train_here(tmp_path / "run", body) == EXIT_FINISHED
    assert same_weights(tmp_path / "run" / kind, earlier / kind)
    state = torch.load(tmp_path / "run" / "checkpoints" / "step-00000001" / "state.pt", weights_only=True)["optimizer"]
    assert {int(moments["step"]) for moments in state["state"].values()} == {1}
    started, ended = events_of(tmp_path / "run", "started", "finished")
    assert (started.data["resumed_from"], ended.data["steps"]) == (None, 1)
    assert ended.data["eval_loss"] == last_event(earlier).data["eval_loss"]


def test_an_earlier_checkpoint_gives_the_loss_of_its_own_evaluation(kind: str, earlier: Path, tmp_path: Path) -> None:
    hyper = {"max_steps": 1, "n_epochs": "auto", "learning_rate": 1e-30}
    body = job_from(earlier, kind, earlier / "checkpoints" / "step-00000002", hyper=hyper)
    assert train_here(tmp_path / "run", body) == EXIT_FINISHED
    assert last_event(tmp_path / "run").data["eval_loss"] == curve_of(earlier)[2, "evaluated"]["eval_loss"]


def test_it_goes_on_from_its_own_checkpoint_once_it_has_one(kind: str, earlier: Path, tmp_path: Path) -> None:
    body = job_from(earlier, kind, earlier)
    assert train_here(tmp_path / "whole", body) == EXIT_FINISHED
    assert train_here(tmp_path / "run", body, stop=lambda run_dir: StopAtCheck(run_dir, 9)) == EXIT_STOPPED
    assert train_here(tmp_path / "run", body, attempt=2) == EXIT_FINISHED
    assert same_weights(tmp_path / "run" / kind, tmp_path / "whole" / kind)
    assert not same_weights(tmp_path / "run" / kind, earlier / kind)


def test_other_weights_to_start_from_make_it_another_run(kind: str, earlier: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(earlier / kind, tmp_path / "moved")
    assert train_here(tmp_path / "run", job_from(earlier, kind, earlier)) == EXIT_FINISHED
    assert train_here(tmp_path / "run", job_from(earlier, kind, moved), attempt=2) == EXIT_FINISHED
    other = job_from(earlier, kind, earlier / "checkpoints" / "step-00000002")
    assert train_here(tmp_path / "run", other, attempt=3) == EXIT_FAILED
    assert last_event(tmp_path / "run").data["code"] == "other_run"


def test_what_is_not_there_or_damaged_is_refused(kind: str, earlier: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for nothing in (tmp_path / "empty", tmp_path / "nowhere"):
        told = failure_of(tmp_path / "run", job_from(earlier, kind, nothing))
        assert "holds no trained weights" in told["message"]
    damaged = shutil.copytree(earlier / kind, tmp_path / "damaged")
    (file,) = damaged.glob("*.safetensors")
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "is damaged" in failure_of(tmp_path / "run", job_from(earlier, kind, damaged))["message"]
    assert last_event(tmp_path / "run").data["code"] == "start_does_not_fit"


def test_weights_of_the_other_kind_are_refused(kind: str, earlier: Path, tmp_path: Path) -> None:
    other = {"adapter": "model", "model": "adapter"}[kind]
    body = job_from(earlier, kind, earlier, adapter=ADAPTERS[other])
    assert "does not go on from" in failure_of(tmp_path / "run", body)["message"]


def test_an_adapter_of_another_base_is_refused(tmp_path: Path) -> None:
    assert train_here(tmp_path / "run", make_job(tmp_path, hyper=HYPER)) == EXIT_FINISHED
    body = make_job(tmp_path, hyper=HYPER, resume_from=str(tmp_path / "run"))
    body["model"] = str(save_model(tmp_path / "other", seed=5))
    assert "another base model" in failure_of(tmp_path / "next", body)["message"]
    # The same base in another place is the same.
    body["model"] = str(shutil.copytree(tmp_path / "base", tmp_path / "copy"))
    assert train_here(tmp_path / "last", body) == EXIT_FINISHED


def test_an_adapter_made_elsewhere_goes_by_the_name_of_its_base(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    body = make_job(tmp_path, hyper=HYPER, adapter={"r": 2, "target_modules": ["q_proj"]})
    config = LoraConfig(r=2, lora_alpha=16, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(make_model(), config)
    model.peft_config["default"].base_model_name_or_path = body["model"]
    model.save_pretrained(tmp_path / "theirs")
    body["resume_from"] = str(tmp_path / "theirs")
    assert train_here(tmp_path / "run", body) == EXIT_FINISHED
    assert weights_of(tmp_path / "run" / "adapter").keys() == weights_of(tmp_path / "theirs").keys()
    config_file = tmp_path / "theirs" / "adapter_config.json"
    write_json(config_file, {**read_json(config_file), "base_model_name_or_path": "org/another"})
    assert "another base model (org/another)" in failure_of(tmp_path / "next", body)["message"]


@pytest.mark.parametrize(
    ("adapter", "field"),
    [
        ({"r": 2}, "adapter.r is 8"),
        ({"alpha": 2}, "adapter.alpha is 16"),
        ({"target_modules": ["q_proj"]}, "target_modules"),
    ],
)
def test_an_adapter_of_another_shape_is_refused_with_the_field(adapter: Any, field: str, tmp_path: Path) -> None:
    assert train_here(tmp_path / "run", make_job(tmp_path, hyper=HYPER)) == EXIT_FINISHED
    body = make_job(tmp_path, hyper=HYPER, adapter=adapter, resume_from=str(tmp_path / "run"))
    assert field in failure_of(tmp_path / "next", body)["message"]


def test_pickles_are_not_taken_for_weights(tmp_path: Path) -> None:
    assert train_here(tmp_path / "run", make_job(tmp_path, hyper=HYPER)) == EXIT_FINISHED
    theirs = shutil.copytree(tmp_path / "run" / "adapter", tmp_path / "theirs")
    (theirs / ADAPTER_WEIGHTS).rename(theirs / "adapter_model.bin")
    body = make_job(tmp_path, hyper=HYPER, resume_from=str(theirs))
    assert "holds no trained weights" in failure_of(tmp_path / "next", body)["message"]


def test_pissa_begins_with_the_base_and_is_refused_together_with_a_start() -> None:
    with pytest.raises(SpecError, match="leave it out, or resume_from") as refused:
        parse_spec({"model": "m", "training_file": "t", "resume_from": "r", "adapter": {"init": "pissa"}})
    assert refused.value.param == "adapter.init"


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_adapter_starts_with_the_weights_that_it_had(name: str, tied: bool, tmp_path: Path) -> None:
    """A first step at next to no rate leaves all of fp32 as it is; the loss on the validation rows is as it was."""
    adapter = KINDS[name]
    assert train_here(tmp_path / "run", make_job(tmp_path, hyper=HYPER, adapter=adapter, tied=tied)) == EXIT_FINISHED
    hyper = {**HYPER, "max_steps": 1, "n_epochs": "auto", "learning_rate": 1e-30}
    for start in (tmp_path / "run", tmp_path / "run" / "checkpoints" / "step-00000002"):
        path = tmp_path / f"from-{start.name}"
        body = make_job(tmp_path, hyper=hyper, adapter=adapter, resume_from=str(start))
        assert train_here(path, body) == EXIT_FINISHED
        assert same_weights(path / "adapter", start / "adapter")
    curve, losses = curve_of(tmp_path / "run"), {}
    for place in ("run", "step-00000002"):
        losses[place] = last_event(tmp_path / f"from-{place}").data["eval_loss"]
    assert losses == {"run": curve[6, "evaluated"]["eval_loss"], "step-00000002": curve[2, "evaluated"]["eval_loss"]}


@pytest.mark.parametrize(("first", "then"), [("lora", "qlora"), ("qlora", "lora")])
def test_the_same_adapter_fits_a_plain_base_and_a_quantised_one(first: str, then: str, tmp_path: Path) -> None:
    assert train_here(tmp_path / "run", make_job(tmp_path, hyper=HYPER, adapter={"type": first})) == EXIT_FINISHED
    hyper = {**HYPER, "max_steps": 1, "n_epochs": "auto", "learning_rate": 1e-30}
    body = make_job(tmp_path, hyper=hyper, adapter={"type": then}, resume_from=str(tmp_path / "run"))
    assert train_here(tmp_path / "next", body) == EXIT_FINISHED
    assert same_weights(tmp_path / "next" / "adapter", tmp_path / "run" / "adapter")


def test_what_pissa_made_is_a_start_for_plain_lora_of_twice_the_rank(tmp_path: Path) -> None:
    adapter = {"init": "pissa", "r": 4, "alpha": 4}
    hyper = {**HYPER, "learning_rate": 1e-3}
    assert train_here(tmp_path / "run", make_job(tmp_path, hyper=hyper, adapter=adapter)) == EXIT_FINISHED
    hyper = {**HYPER, "max_steps": 1, "n_epochs": "auto", "learning_rate": 1e-30}
    body = make_job(tmp_path, hyper=hyper, adapter={"r": 8, "alpha": 8}, resume_from=str(tmp_path / "run"))
    assert train_here(tmp_path / "next", body) == EXIT_FINISHED
    want = last_event(tmp_path / "run").data["eval_loss"]
    assert last_event(tmp_path / "next").data["eval_loss"] == pytest.approx(want, rel=1e-4)


def test_plain_texts_start_from_what_other_rows_made(tmp_path: Path) -> None:
    assert train_here(tmp_path / "run", make_job(tmp_path, hyper=HYPER)) == EXIT_FINISHED
    hyper = {**HYPER, "max_steps": 1, "n_epochs": "auto", "learning_rate": 1e-30}
    body = make_job(tmp_path, method="pretrain", hyper=hyper, resume_from=str(tmp_path / "run"))
    assert train_here(tmp_path / "next", body) == EXIT_FINISHED
    assert same_weights(tmp_path / "next" / "adapter", tmp_path / "run" / "adapter")


def test_the_same_adapter_is_the_same_bytes_each_time_that_it_is_written(tmp_path: Path) -> None:
    body = make_job(tmp_path, hyper=HYPER)
    source, model = find_source(body["model"], weights=True), make_adapted()
    for number in range(8):
        save_weights(model, model.state_dict(), make_tokenizer(), source, tmp_path / str(number))
    assert len({(tmp_path / str(number) / ADAPTER_WEIGHTS).read_bytes() for number in range(8)}) == 1
    with safe_open(tmp_path / "0" / ADAPTER_WEIGHTS, "pt") as file:
        assert file.metadata() == {"format": "pt", "base_digest": source.digest}
    state = load_file(tmp_path / "0" / ADAPTER_WEIGHTS)
    assert all(torch.equal(weight, state[name]) for name, weight in get_peft_model_state_dict(model).items())


@pytest.mark.parametrize(
    ("adapter", "asked"),
    [
        ({"use_dora": True}, {}),
        ({"use_rslora": True}, {}),
        ({"modules_to_save": ["lm_head"]}, {}),
        ({"num_virtual_tokens": 3, "type": "prompt"}, {"num_virtual_tokens": 4, "type": "prompt"}),
        ({"target_modules": ["q_proj"], "type": "ia3"}, {"target_modules": ["v_proj"], "type": "ia3"}),
    ],
)
def test_an_adapter_with_other_options_is_refused(
    adapter: dict[str, Any], asked: dict[str, Any], tmp_path: Path
) -> None:
    assert train_here(tmp_path / "run", make_job(tmp_path, hyper=HYPER, adapter=adapter)) == EXIT_FINISHED
    body = make_job(tmp_path, hyper=HYPER, adapter=asked, resume_from=str(tmp_path / "run"))
    assert f"adapter.{next(iter(adapter))} is" in failure_of(tmp_path / "next", body)["message"]
