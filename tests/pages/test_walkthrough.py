"""docs/walkthrough.ipynb: has run from its first cell to its last, shows its pictures, finds the
scripts, and runs again with the solutions of its exercises (slow).
"""

import ast
import base64
import re
import subprocess
import sys

import nbformat
import pytest
from nbclient import NotebookClient
from support.files import ROOT

FILE = ROOT / "docs" / "walkthrough.ipynb"
NUM_EXERCISES = 3
SOLUTION = re.compile(r"(?s)<details>.*?```python\n(.*?)```.*?</details>")


@pytest.fixture(scope="module")
def notebook():
    return nbformat.read(FILE, as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def texts(cell) -> str:
    """What a cell has printed or shown, pictures left out."""
    return "".join(
        output.get("text", "") + output.get("data", {}).get("text/plain", "")
        for output in cell.outputs
    )


def check_outputs(notebook):
    """Run in order, without errors or messages on stderr, and a picture from each cell that draws
    one.
    """
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        kinds = [output.output_type for output in cell.outputs]
        assert "error" not in kinds
        assert not [output.text for output in cell.outputs if output.get("name") == "stderr"]
        pictures = [
            output.data["image/png"]
            for output in cell.outputs
            if "image/png" in output.get("data", {})
        ]
        assert len(pictures) == cell.source.count("plt.subplots("), cell.source
        assert all(base64.b64decode(picture).startswith(b"\x89PNG") for picture in pictures)


def test_it_is_a_notebook_small_enough_for_a_repository(notebook):
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert FILE.stat().st_size < 1_500_000


def test_it_has_run_from_start_to_end(notebook):
    check_outputs(notebook)
    printed = "".join(map(texts, code_cells(notebook)))
    assert "nan" not in printed and "/" + "tmp/" not in printed and "/" + "home/" not in printed


def test_cells_compile_and_are_not_wide(notebook):
    for cell in notebook.cells:
        assert max(map(len, cell.source.splitlines())) <= 80
        if cell.cell_type == "code":
            ast.parse(cell.source)


def test_links_lead_somewhere(notebook):
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    assert links and not [link for link in links if not (FILE.parent / link).exists()]


def test_each_exercise_has_a_folded_solution(notebook):
    exercises = [cell.source for cell in notebook.cells if "**Exercise " in cell.source]
    solutions = [code for source in exercises for code in SOLUTION.findall(source)]
    assert len(exercises) == len(solutions) == NUM_EXERCISES
    for code in solutions:
        ast.parse(code)


def run_first_cell(notebook, folder, repository=""):
    source = code_cells(notebook)[0].source
    source = source.replace('REPOSITORY = ""', f'REPOSITORY = "{repository}"')
    command = [sys.executable, "-c", source]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_without_the_scripts_it_says_what_to_download(notebook, tmp_path):
    error = run_first_cell(notebook, tmp_path).stderr.splitlines()[-1]
    assert "Download ppo.py and q_learning_gridworld.py" in error and str(tmp_path) in error


def test_it_clones_the_repository_into_an_empty_folder(notebook, tmp_path):
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone of the repository")
    done = run_first_cell(notebook, tmp_path, ROOT)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "onejit" / "ppo.py").exists()


@pytest.mark.slow
def test_it_runs(notebook, monkeypatch):
    """All of it and the solutions, as a reader would run it.

    Here from the root of the repository, `docs/` is where it was run last.
    """
    for name in ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    again = nbformat.from_dict(notebook)
    again.cells = []
    for cell in notebook.cells:
        again.cells.append(cell.copy())
        again.cells += map(nbformat.v4.new_code_cell, SOLUTION.findall(cell.source))
    for cell in code_cells(again):
        cell.outputs, cell.execution_count = [], None
    client = NotebookClient(
        again, timeout=900, kernel_name="python3", resources={"metadata": {"path": ROOT}}
    )
    client.execute()
    check_outputs(again)
    assert "30 of 30 agents reach the goal" in "".join(map(texts, code_cells(again)))
