"""How the tests run: what compiling costs each of them, and their shards."""

import jax
import jax.numpy as jnp
import pytest
from support.compile_times import CompileTimes
from support.tiers import SLOW, shard


def test_programs_seconds_and_the_cache_are_counted_of_each_test(pytestconfig):
    (listener,) = (
        plugin
        for plugin in pytestconfig.pluginmanager.get_plugins()
        if isinstance(plugin, CompileTimes)
    )
    counters = listener.counters
    before = counters.programs, counters.seconds
    jax.jit(lambda x: 2 * x)(jnp.arange(3)).block_until_ready()
    assert counters.programs > before[0] and counters.seconds > before[1]


class Report:
    def __init__(self, nodeid, duration, compile):
        self.nodeid = nodeid
        self.duration = duration
        self.user_properties = [("compile", compile)]


class Terminal:
    def write_line(self, text):
        self.text = text


def test_the_file_has_a_line_for_each_test(tmp_path):
    file = tmp_path / "cache" / "times.csv"
    listener = CompileTimes(file)
    listener.pytest_runtest_logreport(Report("tests/a.py::test_quick@a", 0.5, [0.1, 1, 2]))
    for phase in ([0.5, 1, 0], [1.5, 2, 1]):
        listener.pytest_runtest_logreport(Report("tests/a.py::test_long[x]@a", 2.0, phase))
    terminal = Terminal()
    listener.pytest_terminal_summary(terminal)
    assert file.read_text().splitlines() == [
        "test,seconds,compile seconds,compiled,from the cache",
        "tests/a.py::test_long[x],4.00,2.00,3,1",
        "tests/a.py::test_quick,0.50,0.10,1,2",
    ]
    assert "4 s in tests, of which 2 s to compile 4 programs and to read 3" in terminal.text


def test_each_group_is_in_one_shard():
    groups = {*SLOW, "test_docs", "test_main", "test_sweep"}
    shards = [shard(groups, f"{number}/4") for number in range(1, 5)]
    assert set().union(*shards) == groups and sum(map(len, shards)) == len(groups)
    with pytest.raises(pytest.UsageError, match="5/4"):
        shard(groups, "5/4")
