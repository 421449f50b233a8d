"""The parts of the service as commands say what is wrong with the servers that they are told of."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from store.settings import Settings

NOWHERE = "127.0.0.1:1"


@pytest.mark.parametrize(
    ("command", "setting", "url", "told"),
    [
        ("migrate", "BURNISH_DATABASE_URL", "mysql://u:hidden@x/y", "has to begin with postgresql://"),
        ("migrate", "BURNISH_DATABASE_URL", f"postgresql://u:hidden@{NOWHERE}/x", "no connection"),
        ("worker", "BURNISH_BROKER_URL", "http://:hidden@x", "redis://host:6379/0"),
        ("beat", "BURNISH_BROKER_URL", "redis://[x", "redis://host:6379/0"),
        ("beat", "BURNISH_BROKER_URL", f"redis://:hidden@{NOWHERE}/0", "no connection to 127.0.0.1"),
    ],
)
def test_a_server_that_cannot_be_used_is_told(
    database: Settings, tmp_path: Path, command: str, setting: str, url: str, told: str
) -> None:
    environment = {**os.environ, "BURNISH_DATA_DIR": str(tmp_path), setting: url}
    argv = (sys.executable, "-m", "cli.main", command)
    process = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (process.returncode, process.stdout) == (1, "")
    assert process.stderr.startswith(f"Error: {setting}") and told in process.stderr
    assert "Traceback" not in process.stderr and "hidden" not in process.stderr
