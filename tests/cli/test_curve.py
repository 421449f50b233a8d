"""The loss in the terminal: a chart of the whole run, and lines where nothing can be drawn over."""

import io
import math
import re
from typing import Any

import pytest
from rich.console import Console

from cli.curve import HEIGHT, LossDisplay, describe, draw_loss, make_ticks

TOTAL = 80


def columns(done: int, last_loss: float | None = 2.0) -> dict[str, list[Any]]:
    losses: list[float | None] = [3 * math.exp(-step / 20) + 1 for step in range(done)]
    losses[-1:] = [last_loss] if done else []
    return {
        "step": list(range(1, done + 1)),
        "train_loss": losses,
        "tokens_per_s": [50.0] * done,
        "step_s": [2.0] * done,
    }


def dots(chart: str) -> list[tuple[int, int]]:
    """Places of drawn characters inside the frame: column from the left, row from the top."""
    rows = [re.split("[┤│]", line)[1] for line in chart.splitlines() if re.search("[┤│]", line)]
    return [(x, y) for y, row in enumerate(rows) for x, sign in enumerate(row) if "\u2800" < sign <= "\u28ff"]


def test_a_falling_loss_is_a_falling_line_over_the_part_of_the_run_that_is_done() -> None:
    falling = [4 - step / 20 for step in range(40)]
    places = dots(draw_loss(range(1, 41), falling, TOTAL, width=84, colour=False))
    left, right = min(places), max(places)
    assert right[1] > left[1] + 5, "the right end is lower"
    assert 36 <= right[0] <= 44, "half of the run fills half of the chart"
    heights = {x: min(y for column, y in places if column == x) for x, _ in places}
    assert all(heights[x] <= heights[x + 1] for x in sorted(heights)[:-1] if x + 1 in heights)


def test_the_chart_has_the_asked_size_and_the_steps_below() -> None:
    chart = draw_loss([1, 2, 3], [3.0, 2.0, 1.0], TOTAL, width=60, colour=False)
    lines = chart.splitlines()
    assert len(lines) == HEIGHT
    assert {len(line) for line in lines} == {60}
    assert re.findall(r"\d+", lines[-2]) == ["0", "20", "40", "60", "80"]


def test_colour_codes_are_there_only_where_asked_for() -> None:
    assert "\x1b[" in draw_loss([1, 2], [2.0, 1.0], TOTAL, width=60, colour=True)
    assert "\x1b" not in draw_loss([1, 2], [2.0, 1.0], TOTAL, width=60, colour=False)


def test_a_step_without_a_finite_loss_leaves_a_gap_and_is_said() -> None:
    assert dots(draw_loss([1, 2], [None, None], TOTAL, width=60, colour=False)) == []
    assert "loss is not finite" in describe("running", TOTAL, columns(5, None))


def test_the_line_tells_step_loss_speed_and_time_left() -> None:
    assert describe("queued", None, columns(0)) == "queued"
    assert (
        describe("running", TOTAL, columns(20, 1.5)) == "running  step 20/80  loss 1.500  50 tokens/s  about 2:00 left"
    )
    assert describe("succeeded", TOTAL, columns(80, 1.25)) == "succeeded  step 80/80  loss 1.250"


@pytest.mark.parametrize(("total", "ticks"), [(1, [0, 1]), (81, [0, 20, 40, 60, 80]), (6, [0, 1, 2, 3, 4, 5, 6])])
def test_ticks_are_round_numbers(total: int, ticks: list[int]) -> None:
    assert make_ticks(total) == ticks


def test_without_a_terminal_there_is_a_line_a_tenth_of_the_run_and_one_chart_at_the_end() -> None:
    told = io.StringIO()
    with LossDisplay(Console(file=told, width=90)) as display:
        display.show("queued", None, columns(0))
        display.show("queued", None, columns(0))
        for done in range(81):
            display.show("running", TOTAL, columns(done))
        display.show("succeeded", TOTAL, columns(TOTAL))
    lines = told.getvalue().splitlines()
    assert lines[0] == "queued"
    told_steps = re.findall(r"^running  step (\d+)", told.getvalue(), re.MULTILINE)
    assert told_steps == [str(step) for step in range(8, 81, 8)]
    assert told.getvalue().count("training loss") == 1
    assert "\x1b" not in told.getvalue()


def test_in_a_terminal_the_chart_is_drawn_over_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    for no_colour in (False, True):
        told = io.StringIO()
        console = Console(
            file=told, width=90, height=40, force_terminal=True, no_color=no_colour, color_system="standard"
        )
        with LossDisplay(console) as display:
            for done in (1, 2, 3):
                display.show("running", TOTAL, columns(done))
        assert told.getvalue().count("\x1b[1A") >= 2 * HEIGHT, "the cursor goes back up before each new picture"
        assert bool(re.search(r"\x1b\[(3[0-7]|9[0-7]|38)", told.getvalue())) is not no_colour
