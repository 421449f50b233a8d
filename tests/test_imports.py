"""API, worker and command line start without torch: it costs seconds and gigabytes, and a GPU context after a fork."""

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "transformers", "peft", "deepspeed", "bitsandbytes", "accelerate")


@pytest.mark.parametrize(
    "modules",
    [
        "api.main",
        "worker.tasks, worker.supervise, worker.app",
        "cli.main, cli.up, cli.demo",
        "training.launch, training.__main__, training.plan, training.rows",
    ],
)
def test_nothing_but_the_rank_loads_torch(modules: str, tmp_path: Path) -> None:
    script = f"import sys, {modules}; print([name for name in {HEAVY} if name in sys.modules])"
    environment = {"PATH": "", "BURNISH_DATABASE_URL": "postgresql://nowhere/x", "BURNISH_DATA_DIR": str(tmp_path)}
    root = Path(__file__).parents[1]
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"
