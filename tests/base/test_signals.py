"""Signals that end a training, and those that an import swallows."""

import os
import signal
import subprocess
import sys
import time

import pytest

from onejit.base import signals
from onejit.script import load


@pytest.fixture
def handlers():
    """The handlers of signals are as before after the test."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    original = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # not ignored, as under nohup
    before = {number: signal.getsignal(number) for number in numbers}
    yield before
    for number, handler in original.items():
        signal.signal(number, handler)


def test_a_closed_terminal_is_like_sigterm(handlers):
    """It may send SIGHUP several times, and SIGTERM later."""
    with signals.catching_signals() as caught:
        for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
            os.kill(os.getpid(), number)
        assert caught == [signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGHUP]
        # a second one acts as usual
        assert signal.getsignal(signal.SIGTERM) == handlers[signal.SIGTERM]
        assert signal.getsignal(signal.SIGINT) == handlers[signal.SIGINT]
    assert signal.getsignal(signal.SIGHUP) == handlers[signal.SIGHUP]


def test_nohup_stays_in_force(handlers):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with signals.catching_signals() as caught:
        os.kill(os.getpid(), signal.SIGHUP)
    assert caught == [] and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


BLOCKED = """
import hashlib
from onejit.base import signals
with signals.catching_signals(){opened}:
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**30)  # minutes, without Python's handlers
"""


@pytest.mark.parametrize(
    ("opened", "numbers", "said"),
    [
        ("", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM], "stopped at once"),
        (", signals.ending_at_once('saved')", [signal.SIGTERM], "saved"),
    ],
)
def test_signals_end_a_process_whose_main_thread_is_blocked(opened, numbers, said):
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
    process = subprocess.Popen(
        [sys.executable, "-c", BLOCKED.format(opened=opened)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    signal.signal(signal.SIGHUP, before)
    assert process.stdout.readline() == "ready\n"
    for number in numbers:
        time.sleep(0.2)
        assert process.poll() is None
        process.send_signal(number)
        time.sleep(0.01)
        process.send_signal(number)  # a wrapper that passes it on; both count as one
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (143, f"{said}\n")


SWALLOWS = """
import os
import signal

try:
    os.kill(os.getpid(), signal.SIGINT)
except BaseException:
    pass
open("imported", "w").close()
"""


def test_ctrl_c_that_an_import_swallows_is_raised_after_it(handlers, tmp_path, monkeypatch):
    """Python's own import system swallows it in a callback."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "swallows.py").write_text(SWALLOWS)
    with pytest.raises(KeyboardInterrupt):
        load.load_script("swallows.py")
    assert (tmp_path / "imported").exists()
    assert not any(name.startswith("script_swallows") for name in sys.modules)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
