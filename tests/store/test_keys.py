"""Keys open their project, are kept as digests only, and end when revoked."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from store.errors import NotFoundError
from store.keys import find_project_of, list_keys, make_first_key, make_key, revoke_key
from store.models import ApiKey
from store.session import open_session
from store.settings import Settings
from tests.rows import make_project


def test_a_key_opens_its_project_until_it_is_revoked(database: Settings) -> None:
    with open_session() as session:
        first, second = (make_key(session, make_project(session, name), name) for name in ("a", "b"))
        assert (find_project_of(session, first), find_project_of(session, second)) == ("proj-a", "proj-b")
        key_id = first.split("-")[1]
        revoked_at = revoke_key(session, key_id).revoked_at
        assert revoked_at is not None and revoke_key(session, key_id).revoked_at == revoked_at
        assert find_project_of(session, first) is None and find_project_of(session, second) == "proj-b"
        assert {key.name for key in list_keys(session)} == {"a", "b"}
        assert [key.name for key in list_keys(session, "proj-b")] == ["b"]
        assert revoke_key(session, second).id == second.split("-")[1]
        assert find_project_of(session, second) is None
        for unknown in ("none", "0" * 16, "", "\udcff"):
            with pytest.raises(NotFoundError, match="no key"):
                revoke_key(session, unknown)


def test_what_is_not_exactly_a_key_opens_nothing(database: Settings) -> None:
    with open_session() as session:
        key = make_key(session, make_project(session), "k")
        changed = key[:-1] + ("A" if key[-1] != "A" else "B")
        for wrong in ("", "EMPTY", key[:-1], key + "A", key + "\n", f" {key}", key.upper(), changed, "bk--", "\0", "é"):
            assert find_project_of(session, wrong) is None


def test_no_part_of_a_secret_is_stored(database: Settings) -> None:
    with open_session() as session:
        key = make_key(session, make_project(session), "k")
        secret = key.split("-", 2)[2]
        assert len(secret) == 43  # 256 bits in base64
        [row] = session.query(ApiKey).all()
        assert len(row.digest) == 32
        assert secret not in repr([getattr(row, column.key) for column in ApiKey.__table__.columns])


def test_of_processes_that_start_at_once_one_makes_the_first_key(database: Settings) -> None:
    def start(_: int) -> str | None:
        with open_session() as session:
            return make_first_key(session)

    with ThreadPoolExecutor(8) as pool:
        made = [key for key in pool.map(start, range(8)) if key]
    assert len(made) == 1
    with open_session() as session:
        assert find_project_of(session, made[0]) is not None
        revoke_key(session, made[0].split("-")[1])
        assert make_first_key(session) is None
