"""What holds across files: common blocks, declared dependencies, imports, configs, the README."""

import ast
import importlib
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SYNC = ROOT / "tools" / "sync_blocks.py"
MASTER = ROOT / "ppo_continuous.py"
SCRIPTS = sorted(ROOT.glob("*.py"))
CONFIGS = sorted((ROOT / "configs").rglob("*.*"))
DISTRIBUTIONS = {"yaml": "pyyaml", "orbax": "orbax-checkpoint"}  # where it is not called what its module is called

each_script = pytest.mark.parametrize("path", SCRIPTS, ids=lambda file: file.stem)


@pytest.fixture(scope="module")
def sync():
    return runpy.run_path(str(SYNC))["sync"]


def imports(source: str) -> list[tuple[str, bool]]:
    """`(module, inside a function)` of each import; a relative one begins with a dot."""
    found = []

    def visit(node, inside):
        if isinstance(node, ast.Import):
            found.extend((name.name, inside) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.append(("." * node.level + (node.module or ""), inside))
        inside = inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(ast.parse(source), False)
    return found


def top_names(source: str) -> set[str]:
    return {module.split(".")[0] for module, _ in imports(source)}


def requirements() -> dict[str, str]:
    """The lines of requirements.txt by the distribution they are about."""
    lines = [line.split("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines()]
    return {re.match(r"[\w.-]+", line)[0]: line for line in lines if line}


def script_metadata(source: str) -> dict:
    """The PEP 723 block, found with the expression that the PEP gives."""
    blocks = re.findall(r"(?m)^# /// script$\s(?P<content>(^#(| .*)$\s)+)^# ///$", source)
    assert len(blocks) == 1, f"{len(blocks)} blocks of inline script metadata"
    lines = blocks[0][0].splitlines()
    return tomllib.loads("\n".join(line[2:] if line.startswith("# ") else line[1:] for line in lines))


# Blocks


def block(name, *lines):
    begin = f"# --- block {name}: the same in every script, copied by tools/sync_blocks.py ---"
    return "\n".join([begin, *lines, f"# --- end of block {name} ---"])


def text(*parts):
    return "\n".join(parts) + "\n"


@each_script
def test_blocks_equal_the_master(path, sync):
    source = path.read_text()
    assert sync(MASTER.read_text(), source) == source, "run `make sync`, or make the change in ppo_continuous.py"


@each_script
def test_blocks_that_every_script_has(path):
    found = re.findall(r"(?m)^# --- end of block (\w+) ---$", path.read_text())
    assert found[0] == "config" and found[-3:] == ["arguments", "results", "main"]


def test_blocks_are_not_long():
    blocks = re.findall(r"(?ms)^# --- block \w+:.+?^# --- end of block \w+ ---$", MASTER.read_text())
    assert len(blocks) == 7
    assert max(each.count("\n") + 1 for each in blocks) <= 120


def test_sync_finds_and_mends_a_difference(sync):
    master = text("before", block("a", "x = 1", "y = 2"), "between", block("b", "z = 3"))
    copy = text("other", block("a", "x = 0"), "own", "", "lines", block("b"), "after")
    expected = text("other", block("a", "x = 1", "y = 2"), "own", "", "lines", block("b", "z = 3"), "after")
    assert sync(master, copy) == expected
    assert sync(master, expected) == expected


def test_sync_leaves_out_what_a_script_lacks(sync):
    master = text(block("a", "x = 1"), block("b", "z = 3"))
    assert sync(master, text("own", block("b"))) == text("own", block("b", "z = 3"))
    assert sync(master, text("no block")) == text("no block")


def test_sync_follows_the_order_of_the_script(sync):
    master = text(block("a", "x = 1"), block("b", "z = 3", "w = 4"))
    assert sync(master, text(block("b"), block("a"))) == text(block("b", "z = 3", "w = 4"), block("a", "x = 1"))


def test_sync_keeps_the_end_of_the_file(sync):
    master = text(block("a", "x = 1"))
    assert sync(master, block("a")) == block("a", "x = 1")  # no line break at the end


BEGIN_A, END_A = block("a").split("\n")
BEGIN_B, END_B = block("b").split("\n")


@pytest.mark.parametrize(
    ("copy", "message"),
    [
        (text(block("aa", "x = 1")), "unknown block aa; known are a, b, results, main"),
        (text(block("main")), "no block results, which block main needs"),
        (text(BEGIN_A, "x = 1"), "block a has no end"),
        (text(BEGIN_A, "x = 1", BEGIN_B, END_B), "block b begins inside block a, which has no end"),
        (text(BEGIN_A, BEGIN_B, END_B, END_A), "block b begins inside block a"),
        (text(BEGIN_A, END_B), "end of block b, which has not begun"),
        (text("x = 1", END_A), "end of block a, which has not begun"),
        (text(block("a"), block("a")), "line 3: a second block a"),
        (text("# --- block a ---", "x = 1"), "line 1: not a marker as it should be spelt"),
        (text(BEGIN_A, "x = 1", "# -- end of block a ---"), "line 3: not a marker as it should be spelt"),
    ],
)
def test_sync_errors(sync, copy, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        sync(text(block("a"), block("b"), block("results"), block("main")), copy)


def test_sync_command(tmp_path):
    def run(*args):
        done = subprocess.run([sys.executable, SYNC, *args], capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout, done.stderr

    good, stale, broken = (tmp_path / f"{name}.py" for name in ("good", "stale", "broken"))
    good.write_text(MASTER.read_text())
    stale_text = good.read_text().replace("# --- end of block main ---", "# changed\n# --- end of block main ---")
    stale.write_text(stale_text)
    broken.write_text(text(block("environment"), block("no_such_block")))

    code, out, err = run("--check", good, stale)
    assert (code, err, stale.read_text()) == (1, "", stale_text)
    assert out.count("\n") == 1 and out.endswith("stale.py: block main differs\n")
    code, out, err = run(stale, broken)
    assert (code, out, stale.read_text()) == (2, "", stale_text), "an error must leave all files as they were"
    assert err.count("\n") == 1 and "broken.py: error: unknown block no_such_block" in err
    code, out, err = run(good, stale)
    assert (code, err, stale.read_text()) == (0, "", good.read_text())
    assert out.count("\n") == 1 and out.endswith("stale.py\n")
    assert run("--check", good, stale) == (0, "", "")
    code, out, err = run(tmp_path / "missing.py")
    assert (code, out, err.count("\n")) == (2, "", 1)


# Dependencies and imports


@each_script
def test_script_metadata_names_what_is_imported(path):
    source = path.read_text()
    metadata = script_metadata(source)
    modules = top_names(source) - set(sys.stdlib_module_names)
    needed = {DISTRIBUTIONS.get(module, module) for module in modules}
    if "distrax" in needed:
        needed.add("tfp-nightly")
    known = requirements()
    assert needed <= set(known), f"not in requirements.txt: {sorted(needed - set(known))}"
    assert metadata["requires-python"] == ">=3.11"
    assert metadata["dependencies"] == sorted(known[name] for name in needed)


@each_script
def test_what_starts_the_backend_is_imported_inside_functions(path):
    """Importing gymnax or evosax starts JAX's backend, and `main` has to make cores devices before that."""
    early = {module for module, inside in imports(path.read_text()) if not inside}
    assert not {"gymnax", "brax", "evosax"} & {module.split(".")[0] for module in early}


@each_script
def test_script_imports_no_sibling(path):
    siblings = {file.stem for file in SCRIPTS} | {"tools", "benchmarks", "tests"}
    assert not siblings & top_names(path.read_text())
    assert "" not in top_names(path.read_text()), "a relative import"


def test_imports_are_found():
    source = "import a.b, c\nfrom . import d\ndef f():\n    from e.f import g\nclass C:\n    import h\n"
    assert imports(source) == [("a.b", False), ("c", False), (".", False), ("e.f", True), ("h", False)]
    assert top_names(source) == {"a", "c", "", "e", "h"}


# Configs and the README


@pytest.mark.parametrize("path", CONFIGS, ids=lambda file: str(file.relative_to(ROOT / "configs")))
def test_config_can_be_run(path):
    assert path.suffix == ".yaml", "configs holds only configs/SCRIPT/NAME.yaml"
    assert path.parent.parent == ROOT / "configs"
    assert path.parent.name in {file.stem for file in SCRIPTS}, "no such script"
    script = importlib.import_module(path.parent.name)
    assert script.read_yaml(str(path), script.Config), "sets nothing"
    config, _ = script.parse(["--config", str(path)], script.Config)
    script.check(config)


def test_readme_names_each_make_target():
    targets = re.findall(r"(?m)^([a-z][a-z-]*):", (ROOT / "Makefile").read_text())
    assert {"run", "test", "test-all", "sync", "clean"} <= set(targets)
    readme = (ROOT / "README.md").read_text()
    missing = [target for target in targets if not re.search(rf"make {target}(?![\w-])", readme)]
    assert not missing, f"README.md does not mention: make {', make '.join(missing)}"
