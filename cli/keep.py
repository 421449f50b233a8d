"""A child process that cannot outlive its starter, however the starter ends, kill -9 included.

This file is both sides: `keep` starts a command, and as a script the file is the keeper between the two. The keeper's
stdin is held open by the starter; its end of file is the order to end the command.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Kept:
    """A command that was started with `keep`."""

    command: Sequence[str]
    log: Path | None
    grace_s: float
    _keeper: subprocess.Popen[bytes]

    def poll(self) -> int | None:
        """The exit status once the command has ended (128 + n for signal n), else None."""
        return self._keeper.poll()

    def wait(self, timeout_s: float | None = None) -> int:
        return self._keeper.wait(timeout_s)

    def ask_to_end(self) -> None:
        """Send the command its stop signal; it is killed when it has not ended after its time of grace."""
        if self._keeper.stdin is not None:
            self._keeper.stdin.close()

    def end(self) -> int:
        """End the command, and everything that it left in its process group, and wait for that."""
        self.ask_to_end()
        return self._keeper.wait(self.grace_s + 10)


def keep(
    command: Sequence[str],
    *,
    log: Path | None,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stop_signal: signal.Signals = signal.SIGTERM,
    grace_s: float = 10,
) -> Kept:
    """Start a command in a session of its own, which a Ctrl-C in the terminal does not reach. Its output goes to `log`,
    or without one to where the starter's goes."""
    keeper = [sys.executable, "-I", "-S", __file__, str(int(stop_signal)), str(grace_s), *command]
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") if log is not None else contextlib.nullcontext() as output:
        process = subprocess.Popen(
            keeper, stdin=subprocess.PIPE, stdout=output, stderr=output, cwd=cwd, env=env, start_new_session=True
        )
    return Kept(command, log, grace_s, process)


def _main(stop_signal: int, grace_s: float, command: Sequence[str]) -> int:
    # A signal that is ignored stays so in every descendant, and a shell in the background ignores SIGINT.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as bad:
        print(f"{command[0]} does not start: {bad}", file=sys.stderr)
        return 127
    signal.signal(signal.SIGTERM, lambda *_: child.send_signal(stop_signal))
    threading.Thread(target=_end_with_starter, args=(child, stop_signal, grace_s), daemon=True).start()
    status = child.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    return status if status >= 0 else 128 - status


def _end_with_starter(child: subprocess.Popen[bytes], stop_signal: int, grace_s: float) -> None:
    while os.read(0, 4096):
        pass
    child.send_signal(stop_signal)
    try:
        child.wait(grace_s)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(_main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
