"""Fixtures of the tests of sweeps."""

import os
import signal

import pytest
from support.sweeps import draw_nothing

from onejit.engine import loop


@pytest.fixture
def quick_pictures(monkeypatch):
    draw_nothing(monkeypatch)


@pytest.fixture(scope="module")
def quick_pictures_in_module():
    with pytest.MonkeyPatch.context() as patch:
        draw_nothing(patch)
        yield


@pytest.fixture
def stop_at(monkeypatch):
    """A function that sends this process SIGTERM when so many steps are done."""

    def arrange(steps):
        count = loop.Session.count
        sent = []

        def count_and_stop(session, done, **options):
            count(session, done, **options)
            if session.record.steps_done >= steps and not sent:
                sent.append(os.kill(os.getpid(), signal.SIGTERM))

        monkeypatch.setattr(loop.Session, "count", count_and_stop)

    return arrange
