"""docker-compose.yml and the Dockerfile cannot be run in a test: they are read, and held against the code."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from cli.main import app
from store.settings import Settings

ROOT = Path(__file__).parents[1]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text()
OURS = ("migrate", "api", "beat", "worker")


def get_settings_of(service: str) -> set[str]:
    return set(COMPOSE["services"][service]["environment"])


@pytest.mark.parametrize("service", OURS)
def test_every_setting_is_one_that_the_code_reads(service: str) -> None:
    known = {f"BURNISH_{name.upper()}" for name in Settings.model_fields}
    assert get_settings_of(service) <= known


@pytest.mark.parametrize("service", OURS)
def test_every_process_of_ours_is_told_database_broker_and_object_store(service: str) -> None:
    needed = {"BURNISH_DATABASE_URL", "BURNISH_BROKER_URL", "BURNISH_ARTIFACTS_URL"}
    assert needed <= get_settings_of(service)


def test_the_addresses_are_ones_that_the_settings_take() -> None:
    from store.session import sqlalchemy_url

    environment = COMPOSE["services"]["api"]["environment"]
    assert sqlalchemy_url(environment["BURNISH_DATABASE_URL"]).startswith("postgresql+psycopg://burnish:")
    assert "@postgres:5432/burnish" in environment["BURNISH_DATABASE_URL"]
    assert environment["BURNISH_BROKER_URL"].endswith("@valkey:6379/0")


def test_the_broker_keeps_its_queue_over_a_restart() -> None:
    command = COMPOSE["services"]["valkey"]["command"]
    assert command[command.index("--appendonly") + 1] == "yes"
    assert command[command.index("--maxmemory-policy") + 1] == "noeviction"


def test_nothing_of_ours_starts_before_the_migration_is_done() -> None:
    for service in ("api", "beat", "worker"):
        condition = COMPOSE["services"][service]["depends_on"]["migrate"]["condition"]
        assert condition == "service_completed_successfully"
    assert COMPOSE["services"]["migrate"]["depends_on"]["postgres"]["condition"] == "service_healthy"


def test_the_worker_reserves_gpus_and_gets_time_for_a_checkpoint() -> None:
    worker = COMPOSE["services"]["worker"]
    (device,) = worker["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    grace_s = int(worker["stop_grace_period"].removesuffix("s"))
    assert grace_s > 2 * Settings().stop_grace_s


def test_api_and_worker_see_the_same_artifacts_and_models() -> None:
    services = COMPOSE["services"]
    for name in ("api", "worker"):
        mounts = {volume.rpartition(":/")[2] for volume in services[name]["volumes"]}
        assert {"artifacts", "models:ro"} <= mounts
    mounted = [volume for service in services.values() for volume in service.get("volumes", [])]
    named = {volume.partition(":")[0] for volume in mounted}
    assert {name for name in named if re.fullmatch(r"\w+", name)} == set(COMPOSE["volumes"])


def test_the_api_listens_on_loopback_only() -> None:
    assert [port.startswith("127.0.0.1:") for port in COMPOSE["services"]["api"]["ports"]] == [True]


def test_each_image_is_a_target_of_the_dockerfile() -> None:
    targets = set(re.findall(r"^FROM \S+ AS (\w+)$", DOCKERFILE, re.MULTILINE))
    for service in OURS:
        build = COMPOSE["services"][service].get("build")
        if build:
            assert build["target"] in targets
            assert COMPOSE["services"][service]["image"] == f"burnish-{build['target']}"


def test_each_command_is_one_that_burnish_has() -> None:
    known = set(get_command(app).commands)  # type: ignore[attr-defined]
    started = [COMPOSE["services"][service].get("command") for service in OURS]
    started += [re.findall(r'"([^"]+)"', line) for line in re.findall(r"^CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)]
    ours = [command[1] for command in started if command and command[0] == "burnish"]
    assert {"migrate", "beat", "worker"} == set(ours)
    assert set(ours) <= known


def test_what_the_dockerfile_copies_is_there() -> None:
    for line in re.findall(r"^COPY (.+)$", DOCKERFILE, re.MULTILINE):
        for name in line.split()[:-1]:
            assert (ROOT / name).exists()
