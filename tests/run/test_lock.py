"""A run directory belongs to one process, and stays as it was when a start fails."""

import pytest

from onejit import train
from onejit.run.lock import holding
from onejit.run.record import Record
from onejit.run.write import begin_run, write_inputs
from onejit.script import load


def test_a_run_directory_is_claimed_before_anything_is_compiled(tmp_path, monkeypatch, capsys):
    """The second of two processes is refused, and a start that fails leaves no directory."""
    run_dir = tmp_path / "run"
    words = ["q_learning_gridworld", "--total-timesteps=2000", f"--run-dir={run_dir}"]

    def compile_slices(*args, **options):
        assert [path.name for path in run_dir.iterdir()] == [".lock"]
        with pytest.raises(SystemExit):
            train.main(words)
        assert "another process is writing into this run" in capsys.readouterr().err
        raise ValueError("this config cannot be compiled")

    monkeypatch.setattr(train.compilation, "compile_slices", compile_slices)
    with pytest.raises((ValueError, SystemExit)):
        train.main(words)
    assert not run_dir.exists()


def test_a_run_directory_that_is_a_volume_or_a_link(small_disk, tmp_path):
    """The results are written into it; when a start fails it stays, empty."""
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    script = load.load_script("q_learning_gridworld")
    for run_dir in (link, small_disk(1_000_000)):
        with pytest.raises(StopIteration), holding(run_dir, is_new=True):
            write_inputs(run_dir, script.Config(), script, {})
            raise StopIteration
        assert not any(run_dir.iterdir())
        with holding(run_dir, is_new=True):
            begin_run(run_dir, script.Config(), Record(settings={}), script, {})
        assert (run_dir / "run.json").is_file()
        with pytest.raises(ValueError, match="already exists"), holding(run_dir, True):
            pass
