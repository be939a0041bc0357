"""An output that nobody reads."""

import errno
import subprocess
import sys

import pytest
from support.files import ROOT

from onejit.run.record import read_record
from onejit.script.errors import errors_in_one_line

PRINTS = """
import sys
from onejit.base.output import survive_closed_output

survive_closed_output()
for i in range(100):
    print("x" * 10_000, flush=i % 2)
    print("y" * 10_000, file={file})
print("done", file=open("done", "w"))
"""


@pytest.mark.parametrize("file", ["sys.stdout", "sys.stderr"])
def test_printing_goes_on_without_a_reader(file, tmp_path):
    command = [sys.executable, "-c", PRINTS.format(file=file)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=tmp_path, **pipes) as process:
        process.stdout.close()
        if file == "sys.stderr":
            process.stderr.close()
            process.stderr = None
        assert process.wait(timeout=60) == 0
    assert (tmp_path / "done").read_text() == "done\n"


def test_what_is_printed_arrives():
    code = "from onejit.base.output import survive_closed_output as f; f(); print('\u00e9'); 1 / 0"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, timeout=60, encoding="utf-8")
    assert done.stdout == "\u00e9\n" and "ZeroDivisionError" in done.stderr


@pytest.mark.slow
def test_a_training_goes_on_without_a_reader(tmp_path):
    command = [sys.executable, "-m", "onejit", "train", "q_learning_gridworld"]
    command += ["--total-timesteps=200", "--num-steps=100", "--num-seeds=1", "--run-dir=run"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=tmp_path, **pipes)
    process.stdout.close()
    process.stderr.close()
    assert process.wait(timeout=120) == 0
    assert read_record(tmp_path / "run").finished


def test_a_reader_that_is_gone():
    """As `onejit list | head -1`: no complaint."""
    command = [sys.executable, "-m", "onejit", "list", ROOT / "agents"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0


def test_a_broken_pipe_of_a_training_is_reported(capsys):
    """As of the socket of a tracker, not of the output."""
    with pytest.raises(SystemExit) as stop, errors_in_one_line("onejit train", code=1):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")
    assert stop.value.code == 1
    assert capsys.readouterr().err == "onejit train: error: [Errno 32] Broken pipe\n"
