"""`burnish keys` takes names and ids from people: what it shows is one line a key, and never a secret."""

import pytest
from typer.testing import CliRunner

from cli.keys import describe_keys
from cli.main import app
from store.keys import FIRST_PROJECT
from store.models import ApiKey
from store.session import open_session
from store.settings import Settings
from tests.rows import make_project


@pytest.fixture
def project(database: Settings) -> str:
    with open_session() as session:
        return make_project(session, FIRST_PROJECT)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["keys", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.mark.parametrize("name", ["a\udcff", "a\n0123456789abcdef  valid    forged", "\x1b[2J", "", "  ", "a" * 201])
def test_a_name_that_is_no_line_of_text_is_refused(project: str, name: str) -> None:
    code, told = run("create", "--name", name)
    assert code == 1 and told.startswith("Error: name: ") and told.count("\n") == 1 and "\x1b[2J" not in told
    assert describe_keys() == []


def test_a_name_that_was_kept_before_it_was_checked_is_one_line(project: str) -> None:
    with open_session() as session:
        session.add(ApiKey(id="0" * 16, project_id=project, name="a\nforged \x1b[2J", digest=b"0" * 32))
    assert describe_keys() == ["0" * 16 + "  valid    a\\nforged \\x1b[2J"]


def test_a_whole_key_is_revoked_by_its_id_and_not_shown(project: str) -> None:
    code, key = run("create", "--name", "für Übungen")
    assert code == 0
    key_id = key.split("-")[1]
    assert run("revoke", key.strip()) == (0, f"{key_id} is revoked\n")
    assert describe_keys() == [f"{key_id}  revoked  für Übungen"]


def test_what_is_no_id_is_refused_and_not_told_back(project: str) -> None:
    key = run("create")[1].strip()
    for wrong in ("", "a\udcff", key[:-1], key + "x", key.split("-", 2)[2], "none"):
        code, told = run("revoke", "--", wrong)
        assert code == 1 and told.startswith("Error: no key has such an id")
        assert not wrong or wrong not in told
    code, told = run("revoke", "0" * 16)
    assert code == 1 and "no key '0000000000000000' here" in told
    assert "valid" in describe_keys()[0]
