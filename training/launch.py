"""Starts a run as a process of its own and follows it; what is trained is not known here, and torch is not loaded."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from training.devices import Layout
from training.errors import SpecError
from training.events import Event, read_events
from training.extending import require_same_run
from training.flops import COMPUTE_OPTIMAL_TOKENS_PER_PARAMETER
from training.node import Node
from training.rundir import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_STOPPED,
    MEETING_SETTING,
    SILENCE_SETTING,
    TIMEOUT_SETTING,
    RunDir,
    write_json,
)
from training.spec import JobSpec, load_spec, parse_spec

POLL_S = 0.2
KEPT = {
    *(
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "TZ",
        "LANG",
        "TMPDIR",
        "VIRTUAL_ENV",
        "BURNISH_MODEL_CACHE",
        TIMEOUT_SETTING,
        MEETING_SETTING,
        SILENCE_SETTING,
    ),
    *("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
}
KEPT_PREFIXES = (
    *("LC_", "LD_", "PYTHON", "XDG_", "SSL_", "CUDA_", "NVIDIA_", "NCCL_", "GLOO_", "CUBLAS_"),
    *("OMP_", "MKL_", "KMP_", "GOMP_", "TORCH", "PYTORCH_", "TRITON_", "HF_", "TRANSFORMERS_"),
)
"""What a rank may see of its starter's environment: the keys and addresses of the service are not among it."""
DEFAULTS = {
    # Lets cuBLAS give the same bits each time; it is read when the GPU is first used.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # Likewise the backward pass of the package flash-attn, where a job asks for it.
    "FLASH_ATTENTION_DETERMINISTIC": "1",
    # How often a thread that waits looks again before it sleeps, about a tenth of a millisecond. Longer, as by default,
    # makes a step many times slower as soon as anything else wants a core: each parallel part of it then waits until
    # the system gives the spinning thread's core away. Shorter, each part pays for waking threads up.
    "GOMP_SPINCOUNT": "30000",
}


def make_command(
    run_dir: Path,
    attempt: int,
    *,
    base_name: str | None = None,
    plan_only: bool = False,
    node: Node | None = None,
) -> list[str]:
    """The argv of the rank of a run, or of what starts its ranks on this host where there are several. `base_name` is
    what the adapter's config calls its base, where that is not what the spec names: a service's users know a model by
    its name, not by its folder. `node` is which of several hosts this one is."""
    layout = None if plan_only else _find_layout(RunDir(run_dir))
    several = layout is not None and layout.ranks > 1
    start = ["training.rank.torchrun", "--ranks", str(layout.local_ranks)] if layout and several else ["training.rank"]
    command = [sys.executable, "-m", *start, str(run_dir), "--attempt", str(attempt)]
    command += node.as_arguments() if node is not None else []
    command += ["--base-name", base_name] if base_name is not None else []
    return [*command, "--plan-only"] if plan_only else command


def make_environment(
    base: Mapping[str, str],
    *,
    gpus: Sequence[int] | None = None,
    offline: bool = False,
    model_cache: Path | None = None,
) -> dict[str, str]:
    """The environment of a rank. `gpus` are the indexes of its own devices; None leaves them as they are."""
    kept = {name: value for name, value in base.items() if name in KEPT or name.startswith(KEPT_PREFIXES)}
    own = {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    if gpus is not None:
        own["CUDA_VISIBLE_DEVICES"] = ",".join(str(index) for index in gpus)
    if offline:
        own |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if model_cache is not None:
        own["BURNISH_MODEL_CACHE"] = str(model_cache)
    return {**DEFAULTS, **kept, **own}


def write_spec(spec_file: Path, run_dir: RunDir) -> None:
    """Check a spec and put it into the run directory, its paths made absolute. A longer one of the same run extends it.

    Raises:
        SpecError: the spec is wrong, or the directory holds checkpoints of another one.
    """
    asked = _read_spec(spec_file)
    try:
        run_dir.path.mkdir(parents=True, exist_ok=True)
        if run_dir.list_checkpoints() and run_dir.spec.exists():
            require_same_run(_read_own_spec(run_dir), parse_spec(asked), str(run_dir.path))
        write_json(run_dir.spec, asked)
    except OSError as bad:
        at = bad.filename or run_dir.path
        raise SpecError(f"{at}: {bad.strerror}; choose another run directory, a folder that can be written") from bad


def run_alone(
    run_dir: RunDir,
    environment: Mapping[str, str],
    *,
    quiet: bool = False,
    plan_only: bool = False,
    node: Node | None = None,
) -> int:
    """Start the rank of a prepared directory, pass signals on, tell each event as a line, and wait for its end.

    The exit code is the rank's own. A rank that dies of a signal that was passed on counts as stopped.
    """
    events, offset = read_events(run_dir.events, 0) if run_dir.events.exists() else ([], 0)
    attempt = max((event.attempt for event in events), default=0) + 1
    command = make_command(run_dir.path, attempt, plan_only=plan_only, node=node)
    console = Console(run_dir.events, offset, quiet=quiet or plan_only)
    with run_dir.log.open("ab") as log:
        process = subprocess.Popen(command, env=dict(environment), stdout=log, stderr=subprocess.STDOUT)
    with _passing_signals(process) as passed:
        while process.poll() is None:
            time.sleep(POLL_S)
            console.follow()
    console.follow()
    if -process.returncode in passed:
        return EXIT_STOPPED
    if process.returncode not in (EXIT_FINISHED, EXIT_STOPPED) and not console.told_failure:
        _tell_death(process.returncode, run_dir)
    return process.returncode if process.returncode >= 0 else EXIT_FAILED


class Console:
    """Prints the events of a run, a line each, from a byte offset of its event file on."""

    def __init__(self, events: Path, offset: int, *, quiet: bool) -> None:
        self.told_failure = False
        self._events, self._offset, self._quiet = events, offset, quiet
        self._steps = 0

    def follow(self) -> None:
        """Print what is new."""
        if not self._events.exists():
            return
        events, self._offset = read_events(self._events, self._offset)
        for event in events:
            if event.type == "plan":
                self._steps = event.data["steps"]
            if event.type == "failed":
                self.told_failure = True
                print(f"error: {event.data['message']}", file=sys.stderr, flush=True)
            elif not self._quiet and (line := make_line(event, self._steps)):
                print(line, flush=True)


def make_line(event: Event, steps: int) -> str | None:
    """An event in words; None for one that is not worth a line."""
    data = event.data
    match event.type:
        case "started" if data["resumed_from"] is not None:
            return f"going on from step {data['resumed_from']} on the {data['device']}"
        case "started":
            return f"starting on the {data['device']}"
        case "plan":
            trained, rows = data["trained_parameters"], data["counts"]["trained_rows"]
            return (
                f"plan: {steps} steps of {data['batch_size']} rows ({rows} rows), {trained:,} trained parameters, "
                f"about {data['compute']['flops']:.1e} FLOPs"
            )
        case "metrics":
            return (
                f"step {event.step}/{steps}  epoch {data['epoch']:.2f}  loss {_show(data['train_loss'])}"
                f"  lr {data['learning_rate']:.2e}  grad norm {_show(data['grad_norm'])}"
                f"  {data['tokens_per_s']:.0f} tokens/s{_show_mfu(data.get('mfu'))}"
            )
        case "evaluated":
            return f"step {event.step}/{steps}  validation loss {_show(data['eval_loss'])}"
        case "warning":
            return f"warning: {data['message']}"
        case "early_stopped":
            return str(data["message"])
        case "checkpoint":
            return f"saved {data['path']}"
        case "finished":
            return (
                f"finished after {data['seconds']:.0f} s of training: loss {_show(data['train_loss'])}"
                f"  {data['flops']:.1e} FLOPs{_show_mfu(data['mfu'])}  {data['tokens_per_parameter']:.2g} tokens a "
                f"parameter (from scratch {COMPUTE_OPTIMAL_TOKENS_PER_PARAMETER:.0f} would be compute-optimal)"
            )
        case "stopped":
            return f"stopped at step {event.step}: {data['reason']}; the same command goes on from there"
    return None


@contextmanager
def _passing_signals(process: subprocess.Popen[bytes]) -> Iterator[set[int]]:
    """Pass SIGINT and SIGTERM on for as long as the process runs; holds those that were."""
    passed: set[int] = set()

    def pass_on(number: int, _frame: FrameType | None) -> None:
        passed.add(number)
        process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield passed
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _find_layout(run_dir: RunDir) -> Layout | None:
    """None of a spec that cannot be read: the one rank finds that again, and tells it."""
    try:
        return load_spec(run_dir.spec).layout
    except SpecError:
        return None


def _tell_death(code: int, run_dir: RunDir) -> None:
    """Say how a rank ended that could not say so itself."""
    if code == -signal.SIGKILL:
        ending = "was killed (SIGKILL); the system does this when memory runs out"
    elif code < 0:
        ending = f"died of {signal.Signals(-code).name}"
    else:
        ending = f"ended with code {code}"
    last = run_dir.log.read_text("utf-8", "replace").strip().rpartition("\n")[2]
    if last.startswith("error: "):  # of a node that tells no events
        print(last, file=sys.stderr)
        return
    print(f"error: the training process {ending}. The last line of {run_dir.log}: {last}", file=sys.stderr)


def _read_spec(spec_file: Path) -> dict[str, Any]:
    """The checked body, with absolute paths: the run directory may be gone on with from anywhere."""
    asked = load_spec(spec_file).asked()
    for name in ("model", "training_file", "validation_file", "resume_from"):
        if asked.get(name) and (path := Path(asked[name]).expanduser()).exists():
            asked[name] = str(path.resolve())
    return asked


def _read_own_spec(run_dir: RunDir) -> JobSpec:
    """What the run directory was made for."""
    try:
        return load_spec(run_dir.spec)
    except SpecError as bad:
        raise SpecError(
            f"{run_dir.spec} is damaged, so it cannot be told whose checkpoints these are ({bad.message}); choose "
            "another run directory, or delete that file where they are this run's",
            code="other_run",
        ) from None


def _show(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def _show_mfu(value: float | None) -> str:
    return "" if value is None else f"  mfu {value:.0%}"
