"""The loss of a run in the terminal: a chart that grows where there is a terminal, lines where there is none."""

from collections.abc import Sequence
from typing import Any

import plotext
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

HEIGHT = 14
MAX_WIDTH = 100


class LossDisplay:
    """`show` is called again and again with what the API tells; at the end the whole chart stands there."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._chart = ""
        self._told = ("", -1)

    def __enter__(self) -> "LossDisplay":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()
        elif self._chart:
            self._console.print(Text.from_ansi(self._chart))

    def show(self, status: str, steps_total: int | None, columns: dict[str, list[Any]]) -> None:
        line = describe(status, steps_total, columns)
        if columns["step"]:
            self._chart = draw_loss(
                columns["step"],
                columns["train_loss"],
                steps_total or columns["step"][-1],
                width=min(MAX_WIDTH, self._console.width),
                colour=self._live is not None and not self._console.no_color,
            )
        if self._live:
            self._live.update(Group(Text.from_ansi(self._chart), Text(line)), refresh=True)
        elif self._is_news(status, steps_total, columns):
            self._console.print(line, markup=False)

    def _is_news(self, status: str, steps_total: int | None, columns: dict[str, list[Any]]) -> bool:
        """A new status, or about a tenth of the run more."""
        done = columns["step"][-1] if columns["step"] else 0
        before, told = self._told
        if status == before and done < told + max(1, (steps_total or 0) // 10):
            return False
        self._told = (status, done)
        return True


def describe(status: str, steps_total: int | None, columns: dict[str, list[Any]]) -> str:
    """One line: status, step, loss, speed, and the time that is left at the speed of the last steps."""
    if not columns["step"]:
        return status
    step, loss = columns["step"][-1], columns["train_loss"][-1]
    parts = [status, f"step {step}{f'/{steps_total}' if steps_total else ''}"]
    parts.append("loss is not finite" if loss is None else f"loss {loss:.3f}")
    if status == "running":
        parts.append(f"{columns['tokens_per_s'][-1]:.0f} tokens/s")
        if (utilisation := columns.get("mfu", [None])[-1]) is not None:
            parts.append(f"mfu {utilisation:.0%}")
        if steps_total:
            recent = columns["step_s"][-10:]
            left_s = sum(recent) / len(recent) * (steps_total - step)
            parts.append(f"about {left_s // 60:.0f}:{left_s % 60:02.0f} left")
    return "  ".join(parts)


def draw_loss(
    steps: Sequence[int], losses: Sequence[float | None], steps_total: int, *, width: int, colour: bool
) -> str:
    """A chart whose x axis is the whole run; steps without a finite loss are left out."""
    points = [(step, loss) for step, loss in zip(steps, losses, strict=True) if loss is not None]
    figure = plotext.figure
    figure.clear()
    figure.theme("simple" if colour else "colorless")
    figure.plot_size(width, HEIGHT)
    figure.title("training loss")
    figure.label("step", axis="x")
    figure.ruler("x").lim(0, steps_total)
    figure.ruler("x").ticks(make_ticks(steps_total))
    if points:
        signal = figure.signal(*map(list, zip(*points, strict=True)), marker="braille")
        signal.lines()
        figure.draw(signal)
    drawn = str(figure.build())
    return drawn if colour else plotext.uncolorize(drawn)


def make_ticks(total: int) -> list[int]:
    """At most seven round numbers from 0 on, 1, 2 or 5 times a power of ten apart."""
    gap = next(n * 10**power for power in range(10) for n in (1, 2, 5) if total / (n * 10**power) <= 6)
    return list(range(0, total + 1, gap))
