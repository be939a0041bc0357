"""What compiling costs each test: a plugin of pytest that writes .cache/test_times.csv.

A line has a test, its seconds (fixtures included), how many programs it compiled, in how many
seconds (cache included), and how many it took from the cache instead. The tests that take longest
come first. Processes that a test starts are not counted.
"""

import csv
from collections import defaultdict
from pathlib import Path

import jax
import pytest

from support.files import ROOT

FILE = ROOT / ".cache" / "test_times.csv"
COLUMNS = ("seconds", "compile seconds", "compiled", "from the cache")
BACKEND = "/jax/core/compile/backend_compile_duration"  # also of a program that the cache has
HIT = "/jax/compilation_cache/cache_hits"


class Counters:
    """What this process has compiled so far."""

    def __init__(self):
        self.seconds = 0.0
        self.programs = 0
        self.hits = 0
        jax.monitoring.register_event_duration_secs_listener(self.take_duration)
        jax.monitoring.register_event_listener(self.take_event)

    def take_duration(self, event: str, duration: float, **_):
        if event == BACKEND:
            self.seconds += duration
            self.programs += 1

    def take_event(self, event: str, **_):
        self.hits += event == HIT


class CompileTimes:
    """In the processes that run tests it counts, in the one that reports it adds up and writes."""

    def __init__(self, file: Path = FILE):
        self.file = file
        self.counters = Counters()
        self.before = (0.0, 0, 0)
        self.totals = defaultdict(lambda: [0.0, 0.0, 0, 0])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        """Set-up, call and tear-down have a report each, which xdist carries to its master."""
        report = yield
        counters = self.counters
        now = (counters.seconds, counters.programs, counters.hits)
        seconds, programs, hits = (new - old for new, old in zip(now, self.before, strict=True))
        self.before = now
        report.user_properties.append(("compile", [seconds, programs - hits, hits]))
        return report

    def pytest_runtest_logreport(self, report):
        compile_seconds, compiled, hits = dict(report.user_properties)["compile"]
        spent = (report.duration, compile_seconds, compiled, hits)
        total = self.totals[report.nodeid.rpartition("@")[0] or report.nodeid]
        total[:] = [old + new for old, new in zip(total, spent, strict=True)]

    def pytest_terminal_summary(self, terminalreporter):
        rows = sorted(self.totals.items(), key=lambda row: -row[1][0])
        if not rows:
            return
        self.file.parent.mkdir(exist_ok=True)
        with open(self.file, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("test", *COLUMNS))
            for name, (seconds, compile_seconds, *counts) in rows:
                writer.writerow((name, f"{seconds:.2f}", f"{compile_seconds:.2f}", *counts))
        seconds, compile_seconds, compiled, hits = map(sum, zip(*self.totals.values(), strict=True))
        terminalreporter.write_line(
            f"{seconds:.0f} s in tests, of which {compile_seconds:.0f} s to compile {compiled} "
            f"programs and to read {hits} from the cache: {self.file}"
        )
