"""Progress of a training in a log file."""

import numpy as np
import pytest

from onejit.engine import progress


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets. Standard error is no terminal."""
    times = [100.0]
    monkeypatch.setattr("tqdm.std.time", lambda: times[0])
    monkeypatch.setenv("TQDM_DISABLE", "1")  # has no effect
    return times


def test_progress_in_a_log_file_is_lines(clock, capfd):
    with progress.progress_bar(1000, disable=False) as bar:
        for _ in range(10):
            clock[0] += 10.0
            bar.set_postfix_str("return 5", refresh=False)
            bar.update(100)
    *said, end = capfd.readouterr().err.splitlines()
    assert end.startswith("100%|")
    assert said[0] == " 30%|###       | 300/1.00k [00:30<01:10, 10.0step/s, return 5]"
    assert len(said) == 3 and "\r" not in "".join(said)


def test_the_speed_is_of_the_steps_of_this_session(clock, capfd):
    """100 steps per second, after 500 steps of an earlier one and a compilation."""
    bar = progress.progress_bar(1000, disable=False)
    progress.count_restored(bar, 500)
    clock[0] += 1000.0
    bar.unpause()
    clock[0] += 1.0
    bar.update(100)
    bar.close()
    said = capfd.readouterr().err.splitlines()
    assert said[-1] == " 60%|######    | 600/1.00k [00:01<00:04, 100step/s]"


def test_without_steps_and_in_other_processes_nothing_is_shown(clock, capfd):
    with progress.progress_bar(1000, disable=False):
        clock[0] += 100.0
    with progress.progress_bar(1000, disable=True) as bar:
        progress.count_restored(bar, 500)
        bar.update(100)
    assert capfd.readouterr().err == ""


def test_the_best_return_is_of_all_notes_so_far(clock):
    bar = progress.progress_bar(100, disable=False)
    found = [
        progress.note_of_returns(bar, np.array(returns))
        for returns in ([1.0, 5.0, np.nan], [np.nan], [2.0, 3.0])
    ]
    assert found == ["return 1 to 5, best 5", "", "return 2 to 3, best 5"]
