"""Progress of a training in a log file: speed and time left."""

import numpy as np
import pytest

from onejit.base import text
from onejit.engine import progress


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets."""
    times = [100.0]
    monkeypatch.setattr("tqdm.std.time", lambda: times[0])
    return times


@pytest.mark.parametrize(
    ("total", "left"),
    [(10_000, "98 s left"), (100_000, "17 min left"), (20_000_000, "2.3 days left")],
)
def test_time_left_after_resuming(clock, capsys, total, left):
    """100 steps per second in this session, after 100 steps of an earlier one."""
    lines = progress.Lines(total)
    progress.count_restored(lines, 100)
    clock[0] += 1.0
    lines.update(100)
    clock[0] += 30.0
    lines.unpause()  # the 30 seconds were compilation
    lines.show()
    assert f"100 steps/s, {left}" in capsys.readouterr().err


def test_progress_in_a_log_file_is_lines(clock, capfd):
    with progress.progress_bar(1000, disable=False) as bar:  # standard error is no terminal here
        for _ in range(10):
            clock[0] += 10.0
            bar.set_postfix_str("return 5", refresh=False)
            bar.update(100)
    said = capfd.readouterr().err.splitlines()
    first = "30.0% of 1,000 steps, 10 steps/s, 70 s left return 5"
    assert said[0] == first and said[-1].startswith("100.0% of 1,000 steps")
    assert len(said) == 4 and "\r" not in "".join(said)


def test_no_time_is_left_at_the_end(clock, capsys):
    lines = progress.Lines(100)
    clock[0] += 1.0
    lines.update(100)
    lines.show()
    assert capsys.readouterr().err == "100.0% of 100 steps, 100 steps/s\n"


def test_no_speed_before_the_first_steps_of_this_session(clock, capsys):
    lines = progress.Lines(1000)
    progress.count_restored(lines, 500)
    clock[0] += 1.0
    lines.show()
    assert capsys.readouterr().err == "50.0% of 1,000 steps\n"


def test_the_best_return_is_of_all_notes_so_far():
    lines = progress.Lines(100)
    found = [
        progress.note_of_returns(lines, np.array(returns))
        for returns in ([1.0, 5.0, np.nan], [np.nan], [2.0, 3.0])
    ]
    assert found == ["return 1 to 5, best 5", "", "return 2 to 3, best 5"]


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0, "0 s"), (119, "119 s"), (7000, "117 min"), (9000, "2.5 h")]
)
def test_durations(seconds, shown):
    assert text.duration(seconds) == shown
