"""The embedded servers start in a second, keep their data, and recover from whatever ended them."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote

import psutil
import psycopg
import pytest
import redis

from cli.embedded import EmbeddedPostgres, EmbeddedValkey, embedded_postgres, embedded_valkey
from cli.errors import SetupError
from tests.cli.processes import list_processes_in, wait_until

STARTER = """
import sys, time
from pathlib import Path
from cli.embedded import embedded_postgres, embedded_valkey
with embedded_postgres(Path(sys.argv[1]) / "pg") as pg, embedded_valkey(Path(sys.argv[1]) / "vk") as vk:
    print(pg, vk, flush=True)
    time.sleep(300)
"""


def test_rows_are_there_after_a_restart(tmp_path: Path) -> None:
    with embedded_postgres(tmp_path) as url:
        write_row(url, "kept")
    with embedded_postgres(tmp_path) as url:
        assert read_rows(url) == ["kept"]


def test_a_queue_is_there_after_a_restart(tmp_path: Path) -> None:
    with embedded_valkey(tmp_path) as url, redis.Redis.from_url(url) as client:
        client.rpush("queue", "first", "second")
    with embedded_valkey(tmp_path) as url, redis.Redis.from_url(url) as client:
        assert client.lrange("queue", 0, -1) == [b"first", b"second"]


def test_servers_in_two_folders_know_nothing_of_each_other(tmp_path: Path) -> None:
    with (
        embedded_postgres(tmp_path / "a", durable=False) as one,
        embedded_postgres(tmp_path / "b", durable=False) as other,
        embedded_valkey(tmp_path / "c") as queue,
        embedded_valkey(tmp_path / "d") as other_queue,
    ):
        write_row(one, "in one")
        write_row(other, "in other")
        assert read_rows(one) == ["in one"]
        assert read_rows(other) == ["in other"]
        redis.Redis.from_url(queue).set("key", "value")
        assert redis.Redis.from_url(other_queue).get("key") is None


def test_no_process_is_left_after_the_end(tmp_path: Path) -> None:
    with embedded_postgres(tmp_path / "pg") as url, embedded_valkey(tmp_path / "vk"), psycopg.connect(url):
        assert list_processes_in(tmp_path)
    assert list_processes_in(tmp_path) == []


def test_a_path_that_is_too_long_for_a_socket_is_no_hindrance(tmp_path: Path) -> None:
    with embedded_postgres(tmp_path / ("long" * 30) / "and 'quoted' ü", durable=False) as url:
        write_row(url, "kept")
        assert read_rows(url) == ["kept"]


def test_after_a_kill_a_long_path_is_reached_at_the_same_url_and_an_end_leaves_no_socket(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    with starter(folder) as (process, urls):
        write_row(urls[0], "committed")
        process.kill()
        process.wait()
        wait_until(lambda: not list_processes_in(folder))
    sockets = Path(unquote(urls[0].partition("host=")[2]))
    assert sockets.stat().st_mode & 0o777 == 0o700
    with embedded_postgres(folder / "pg") as url:
        assert url == urls[0]
        assert read_rows(urls[0]) == ["committed"]
    assert not sockets.exists()


def test_a_socket_folder_of_somebody_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    with EmbeddedPostgres(folder) as server:
        sockets = Path(unquote(server.url.partition("host=")[2]))
    sockets.symlink_to(tmp_path)
    try:
        with pytest.raises(SetupError, match="belongs to somebody else"), EmbeddedPostgres(folder):
            pass
        assert sockets.is_symlink()
    finally:
        sockets.unlink()
    if os.geteuid() == 0:
        sockets.mkdir()
        os.chown(sockets, 12345, 12345)
        try:
            with pytest.raises(SetupError, match="belongs to somebody else"), EmbeddedPostgres(folder):
                pass
        finally:
            sockets.rmdir()


def test_strangers_on_this_machine_are_kept_out(tmp_path: Path) -> None:
    with embedded_valkey(tmp_path / "vk") as url:
        port = redis.Redis.from_url(url).get_connection_kwargs()["port"]
        with_no_password = redis.Redis(host="127.0.0.1", port=port, retry=None)
        with pytest.raises(redis.AuthenticationError):
            with_no_password.ping()
        assert (tmp_path / "vk" / "valkey.conf").stat().st_mode & 0o077 == 0
    with embedded_postgres(tmp_path / "pg", durable=False):
        assert (tmp_path / "pg" / "data").stat().st_mode & 0o077 == 0


def test_both_end_with_a_killed_starter_and_recover_what_was_committed(tmp_path: Path) -> None:
    with starter(tmp_path) as (process, urls):
        write_row(urls[0], "committed")
        redis.Redis.from_url(urls[1]).rpush("queue", "message")
        process.kill()
        process.wait()
        wait_until(lambda: not list_processes_in(tmp_path))
    assert_recovered(tmp_path)


def test_servers_that_outlived_their_keepers_are_ended_first(tmp_path: Path) -> None:
    with starter(tmp_path) as (process, urls):
        write_row(urls[0], "committed")
        redis.Redis.from_url(urls[1]).rpush("queue", "message")
        for child in process.children():
            child.kill()
        process.kill()
        process.wait()
        wait_until(lambda: {"postgres", "valkey-server"} == {left.name() for left in list_processes_in(tmp_path)})
    assert_recovered(tmp_path)
    assert list_processes_in(tmp_path) == []


def test_everything_killed_at_once_is_recovered(tmp_path: Path) -> None:
    with starter(tmp_path) as (process, urls):
        write_row(urls[0], "committed")
        redis.Redis.from_url(urls[1]).rpush("queue", "message")
        time.sleep(1.1)  # what Valkey's append-only file may lose
        for one in [*process.children(recursive=True), process]:
            one.kill()
        process.wait()
    assert_recovered(tmp_path)


def test_a_pid_file_whose_number_now_belongs_to_another_process_is_no_hindrance(tmp_path: Path) -> None:
    with embedded_postgres(tmp_path / "pg") as url, embedded_valkey(tmp_path / "vk"):
        write_row(url, "committed")
        old = (tmp_path / "pg" / "data" / "postmaster.pid").read_text().splitlines()
    with subprocess.Popen(("sleep", "300")) as stranger:
        (tmp_path / "pg" / "data" / "postmaster.pid").write_text("\n".join([str(stranger.pid), *old[1:]]) + "\n")
        (tmp_path / "vk" / "pid").write_text(str(stranger.pid))
        with embedded_postgres(tmp_path / "pg") as url, embedded_valkey(tmp_path / "vk"):
            assert read_rows(url) == ["committed"]
        assert stranger.poll() is None
        stranger.kill()


def test_a_database_whose_making_was_cut_short_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "new" / "base").mkdir(parents=True)
    with embedded_postgres(tmp_path, durable=False) as url:
        write_row(url, "kept")


def test_a_folder_in_use_is_refused_and_its_holder_named(tmp_path: Path) -> None:
    with starter(tmp_path) as (process, _):
        for server in (embedded_postgres(tmp_path / "pg"), embedded_valkey(tmp_path / "vk")):
            with pytest.raises(SetupError, match=f"in use by process {process.pid};"), server:
                pass
        process.terminate()
        process.wait()


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match="BURNISH_DATA_DIR"), embedded_valkey(tmp_path / "file" / "vk"):
        pass


def test_a_server_that_cannot_start_tells_its_log(tmp_path: Path) -> None:
    with embedded_postgres(tmp_path, durable=False):
        pass
    (tmp_path / "data" / "postgresql.conf").write_text("no_such_setting = 1\n")
    with pytest.raises(SetupError, match="no_such_setting"), embedded_postgres(tmp_path):
        pass


def test_a_server_that_died_is_started_again_at_the_same_url(tmp_path: Path) -> None:
    with EmbeddedPostgres(tmp_path / "pg") as database, EmbeddedValkey(tmp_path / "vk") as queue:
        urls = database.url, queue.url
        kept = [database.start(), queue.start()]
        write_row(urls[0], "committed")
        for server in list_processes_in(tmp_path):
            if "postgres" in server.name() and server.ppid() != 1:
                server.kill()
        kept[0].wait(20)
        assert (database.url, queue.url) == urls
        kept.append(database.start())
        assert read_rows(urls[0]) == ["committed"]
        for one in kept:
            one.end()


@contextmanager
def starter(folder: Path) -> Iterator[tuple[psutil.Popen, list[str]]]:
    """A process of its own that runs both servers, and their URLs."""
    process = psutil.Popen((sys.executable, "-c", STARTER, str(folder)), stdout=subprocess.PIPE, text=True)
    try:
        yield process, process.stdout.readline().split()
    finally:
        if process.is_running():
            process.kill()


def assert_recovered(folder: Path) -> None:
    with embedded_postgres(folder / "pg") as url, embedded_valkey(folder / "vk") as queue:
        assert read_rows(url) == ["committed"]
        with redis.Redis.from_url(queue) as client:
            assert client.lrange("queue", 0, -1) == [b"message"]


def write_row(url: str, text: str) -> None:
    with psycopg.connect(url) as connection:
        connection.execute("create table if not exists kept (text text)")
        connection.execute("insert into kept values (%s)", (text,))


def read_rows(url: str) -> list[str]:
    with psycopg.connect(url) as connection:
        return [text for (text,) in connection.execute("select text from kept").fetchall()]
