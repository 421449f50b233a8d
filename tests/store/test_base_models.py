"""Names of base models: from the operator's map, or the hub where it is allowed, and never a path of a client."""

import json
import os
from pathlib import Path

import pytest

from store.base_models import HUB_ID, ModelMapError, find_model, get_model, list_models
from store.errors import InvalidRequestError, NotFoundError
from store.settings import get_settings


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BURNISH_MODELS", str(tmp_path / "models.yaml"))
    get_settings.cache_clear()
    return tmp_path


def write_map(folder: Path, text: str) -> None:
    (folder / "models.yaml").write_text(text)


def test_each_form_of_an_entry_is_understood(folder: Path) -> None:
    (folder / "here").mkdir()
    write_map(
        folder,
        """
        folder: ./llama
        existing: here
        absolute: /models/llama
        gguf: weights/small.gguf
        hub: HuggingFaceTB/SmolLM2-135M-Instruct
        pinned: {hub: org/name, revision: 0a1b2c}
        explicit: {path: org/name}
        """,
    )
    found = {model.name: (model.source, model.revision) for model in list_models()}
    assert found == {
        "folder": (str(folder / "llama"), None),
        "existing": (str(folder / "here"), None),
        "absolute": ("/models/llama", None),
        "gguf": (str(folder / "weights/small.gguf"), None),
        "hub": ("HuggingFaceTB/SmolLM2-135M-Instruct", None),
        "pinned": ("org/name", "0a1b2c"),
        "explicit": (str(folder / "org/name"), None),
    }
    assert find_model("pinned").reference == "org/name@0a1b2c"
    assert find_model("folder").reference == str(folder / "llama")
    assert get_model("hub").created_at > 1_600_000_000
    with pytest.raises(NotFoundError):
        get_model("llama")


def test_a_map_in_json_is_read_and_a_change_is_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "models.json"
    monkeypatch.setenv("BURNISH_MODELS", str(path))
    get_settings.cache_clear()
    path.write_text(json.dumps({"a": "/a"}))
    assert [model.name for model in list_models()] == ["a"]
    path.write_text(json.dumps({"b": "/b"}))
    os.utime(path, ns=(1, 1))
    assert [model.name for model in list_models()] == ["b"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("- a", "has to hold names"),
        ("a: [", "cannot be read"),
        ("1: /a", "1 is no name"),
        ("'ft:x': /a", "ft:x"),
        ("a: 5", "a: 5 is not a folder"),
        ("a: {hub: ../b}", "is not a folder"),
        ("a: {hub: org/name, revision: 123}", "revision 123 is not"),
        ("a: {path: /a, revision: main}", "for the hub only"),
        ("a: {folder: /a}", "is not a folder"),
        ("a: ~nobody-has-this-name/x", "home directory"),
        ("a: " + "[" * 3000, "too deep"),
    ],
)
def test_a_wrong_map_is_told_to_the_operator(folder: Path, text: str, told: str) -> None:
    write_map(folder, text)
    with pytest.raises(ModelMapError, match=told) as caught:
        list_models()
    assert "BURNISH_MODELS" in caught.value.message and caught.value.fault == "infrastructure"


def test_what_is_no_map_at_all_is_told_to_the_operator(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "latin.json").write_bytes(b'{"\xfcbung": "/a"}')
    (folder / "deep.json").write_text('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}")
    (folder / "shown.json").write_text('{"a": ' + "[" * 900 + "]" * 900 + "}")
    for name, told in (
        (".", "is a folder"),
        ("latin.json", "not UTF-8 at byte 3"),
        ("deep.json", "too deep"),
        ("shown.json", "shown.json"),
        ("latin.json/x", "Not a directory"),
    ):
        monkeypatch.setenv("BURNISH_MODELS", str(folder / name))
        get_settings.cache_clear()
        with pytest.raises(ModelMapError, match=told) as caught:
            list_models()
        assert "BURNISH_MODELS" in caught.value.message


def test_a_missing_map_is_told_and_no_map_is_no_models(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelMapError, match="No such file"):
        list_models()
    monkeypatch.delenv("BURNISH_MODELS")
    get_settings.cache_clear()
    assert list_models() == []
    with pytest.raises(InvalidRequestError, match="has named none yet"):
        find_model("a")


def test_an_unknown_name_is_refused_with_those_that_are_near(folder: Path) -> None:
    write_map(folder, "{smollm: /a, llama: /b}")
    with pytest.raises(InvalidRequestError, match="did you mean smollm") as caught:
        find_model("smolm")
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
    with pytest.raises(InvalidRequestError, match="there are llama, smollm"):
        find_model("zzz")
    with pytest.raises(InvalidRequestError, match="not offered yet"):
        find_model("ft:smollm:default::abc")


NO_HUB_IDS = [
    *("../../etc", "..", "a", "a/b/c", "/etc/passwd", "./a", "a/..", "../a", "a/.", "./b", ".a/b", "a/.b", "a//b"),
    *("file:///etc/passwd", "https://x/y", "%2e%2e/a", "a/b%00", "a/b\0", "a/b\n", "\u2024\u2024/a", "a/\uff0e\uff0e"),
    *(
        "C:\\a",
        "a\\b/c",
        "~/a",
        "-a/b",
        "a/-b",
        "a/b.",
        "a/b-",
        "a--b/c",
        "a..b/c",
        "a/b@main",
        "a b/c",
        "$(id)/x",
        ";/x",
    ),
    *("a/" + "b" * 97, "é/a", ""),
]


@pytest.mark.parametrize("name", NO_HUB_IDS)
def test_what_is_no_hub_id_is_never_looked_up(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    write_map(folder, "{tiny: /a}")
    monkeypatch.setenv("BURNISH_ALLOW_HUB", "true")
    get_settings.cache_clear()
    with pytest.raises(InvalidRequestError):
        find_model(name)


def test_hub_ids_are_taken_only_where_the_operator_allows_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_map(folder, "{tiny: /a}")
    names = ["HuggingFaceTB/SmolLM2-135M-Instruct", "Qwen/Qwen2.5-0.5B", "a/b", "x1/y_", "openai-community/gpt2"]
    for name in names:
        assert HUB_ID.fullmatch(name)
        with pytest.raises(InvalidRequestError):
            find_model(name)
    monkeypatch.setenv("BURNISH_ALLOW_HUB", "true")
    get_settings.cache_clear()
    assert [find_model(name).reference for name in names] == names
