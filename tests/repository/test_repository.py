"""What holds across files: shared blocks, declared dependencies, imports, configs.

test_docs.py has the tests of pages.
"""

import ast
import datetime
import importlib
import re
import runpy
import subprocess
import sys
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.files import ROOT, repository_files

sys.path.insert(0, str(ROOT / "tools"))
import address
import script_lists

from onejit.run.directory import read_config

SYNC = ROOT / "tools" / "sync_blocks.py"
MASTER = ROOT / "ppo_continuous.py"
SCRIPTS = repository_files("*.py")
CONFIGS = repository_files("configs/**/*.*")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# By the package, which does not pin it or does not name it.
ALSO_NEEDED = {"distrax": "tfp-nightly", "gymnax": "six"}
# Where a distribution is not called what its module is called.
DISTRIBUTIONS = {"PIL": "pillow", "yaml": "pyyaml"}

each_script = pytest.mark.parametrize("path", SCRIPTS, ids=lambda file: file.stem)


@pytest.fixture(scope="module")
def sync():
    return runpy.run_path(str(SYNC))


def imports(nodes) -> set[str]:
    """The modules of the imports among these nodes; a relative one begins with a dot."""
    modules = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            modules |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add("." * node.level + (node.module or ""))
    return modules


def top_names(source: str) -> set[str]:
    return {module.split(".")[0] for module in imports(ast.walk(ast.parse(source)))}


def requirements() -> dict[str, str]:
    """The dependencies of pyproject.toml by distribution."""
    return {Requirement(line).name: line for line in PROJECT["dependencies"]}


def script_metadata(source: str) -> dict:
    """The PEP 723 block, found with the expression that the PEP gives."""
    blocks = re.findall(r"(?m)^# /// script$\s(?P<content>(^#(| .*)$\s)+)^# ///$", source)
    assert len(blocks) == 1, f"{len(blocks)} blocks of inline script metadata"
    lines = blocks[0][0].splitlines()
    return tomllib.loads(
        "\n".join(line[2:] if line.startswith("# ") else line[1:] for line in lines)
    )


# Blocks


def block(name, *lines):
    return "\n".join([f"# --- {name} (shared) ---", *lines])


def text(*parts):
    return "\n\n\n".join(parts) + "\n"


@each_script
def test_blocks_equal_the_masters(path, sync):
    source = path.read_text()
    assert "main" in sync["shared_blocks"](source)
    is_current = sync["sync"](sync["read_masters"](), source) == source
    assert is_current, "run `make sync`, or make the change in the master"


def test_sync_leaves_out_what_a_script_lacks_and_what_is_its_own(sync):
    """And follows the order of the script, also where its last line has no break."""
    masters = sync["shared_blocks"](
        text(block("a", "x = 1"), "# --- mine ---\ny = 2", block("b", "z = 3", "w = 4"))
    )
    assert masters == {"a": block("a", "x = 1"), "b": block("b", "z = 3", "w = 4")}
    mine = "# --- a ---\nx = 2"
    expected = text(masters["b"], masters["a"], mine)
    assert sync["sync"](masters, text(block("b"), block("a"), mine)) == expected
    assert sync["sync"](masters, f"own\n{block('a')}") == f"own\n{block('a', 'x = 1')}"


@pytest.mark.parametrize(
    ("copy", "message"),
    [
        (text(block("aa", "x = 1")), "unknown shared block 'aa'; known are 'a', 'b'"),
        (text(block("a"), block("a")), "a second shared block 'a'"),
        (
            text("# --- a (shared), and more ---", "x = 1"),
            "a banner that does not end with `(shared) ---`: # --- a (shared), and more ---",
        ),
        (
            text(block("a"), "def mine():\n    pass"),
            "block 'a' holds mine, which the master lacks",
        ),
    ],
)
def test_sync_errors(sync, copy, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        sync["sync"](sync["shared_blocks"](text(block("a"), block("b"))), copy)


def test_sync_command(tmp_path):
    def run(*args):
        command = [sys.executable, SYNC, *args]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout, done.stderr

    good = tmp_path / "good.py"
    stale = tmp_path / "stale.py"
    mine = tmp_path / "mine.py"
    broken = tmp_path / "broken.py"
    good.write_text(MASTER.read_text())
    begin = 'if __name__ == "__main__":\n    sys.path'
    stale_text = good.read_text().replace(begin, f"# changed\n{begin}")
    stale.write_text(stale_text)
    mine_text = stale_text.replace("# --- main (shared) ---", "# --- main ---")
    mine.write_text(mine_text)
    broken.write_text(text(block("main"), block("no such block")))

    code, out, err = run("--check", good, stale)
    assert (code, err, stale.read_text()) == (1, "", stale_text)
    assert out.count("\n") == 1 and out.endswith("stale.py: block 'main' differs\n")
    code, out, err = run(stale, broken)
    assert (code, out) == (2, "")
    assert stale.read_text() == stale_text, "an error must leave all files as they were"
    assert err.count("\n") == 1
    assert "broken.py: error: unknown shared block 'no such block'" in err
    code, out, err = run(good, stale, mine)
    assert (code, err) == (0, "")
    assert stale.read_text() == good.read_text() and mine.read_text() == mine_text
    assert "stale.py: block 'main' updated\n" in out
    assert "mine.py: has no shared block 'main'" in out
    assert run("--check", good, stale) == (0, "", "")
    code, out, err = run(tmp_path / "missing.py")
    assert (code, out, err.count("\n")) == (2, "", 1)


# The list of scripts


def test_every_script_is_in_the_list_and_all_that_is_made_of_it_is_current():
    assert sorted(script_lists.SCRIPTS) == [file.stem for file in SCRIPTS]
    for_tasks = set().union(*script_lists.DATA["tasks"].values())
    assert for_tasks == set(script_lists.SCRIPTS), "README.md does not name all scripts"
    assert not script_lists.not_current(), "run `python tools/script_lists.py`"


def test_the_address_of_the_repository_has_one_setting():
    current = {name: (ROOT / name).read_text() for name in address.WRITERS}
    assert address.texts(address.read_address()) == current, "run `python tools/address.py`"
    for name, text in address.texts("https://example.org/onejit").items():
        assert "https://example.org/onejit" in text, name


def test_a_list_is_written_between_its_marks():
    text = "above\n# scripts: begin, as ever\n- old\n- old\n# scripts: end\nbelow\n"
    expected = "above\n# scripts: begin, as ever\n- new\n# scripts: end\nbelow\n"
    assert script_lists.with_list(text, ["- new"]) == expected
    assert script_lists.with_list(expected, ["- new"]) == expected


# Dependencies and imports


@each_script
def test_script_metadata_names_what_is_imported(path):
    source = path.read_text()
    metadata = script_metadata(source)
    modules = top_names(source) - set(sys.stdlib_module_names)
    needed = {DISTRIBUTIONS.get(module, module) for module in modules}
    needed |= {other for package, other in ALSO_NEEDED.items() if package in needed}
    known = requirements()
    assert needed <= set(known), f"not in pyproject.toml: {sorted(needed - set(known))}"
    assert metadata["requires-python"] == ">=3.11"
    assert sorted(metadata["dependencies"]) == sorted(known[name] for name in needed)


def test_each_requirement_is_imported():
    """By a script or by onejit, or a package that one of them imports needs it."""
    files = SCRIPTS + repository_files("onejit/**/*.py")
    modules = set().union(*(top_names(path.read_text()) for path in files))
    needed = {DISTRIBUTIONS.get(module, module) for module in modules}
    needed |= {other for package, other in ALSO_NEEDED.items() if package in needed}
    assert set(requirements()) <= needed, sorted(set(requirements()) - needed)


@each_script
def test_script_metadata_names_a_date(path):
    """No package newer than that is installed: a script runs in five years. The same in all."""
    tool = script_metadata(path.read_text())["tool"]
    assert tool == script_metadata(MASTER.read_text())["tool"] and tool.keys() == {"uv"}
    date = tool["uv"].pop("exclude-newer")
    as_in_rfc_3339 = re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", date)
    assert tool == {"uv": {}} and as_in_rfc_3339
    assert datetime.datetime.fromisoformat(date) < datetime.datetime.now(datetime.UTC)


def pins() -> dict[str, Requirement]:
    """The lines of constraints.txt by distribution, without those for other systems."""
    text = (ROOT / "constraints.txt").read_text()
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    known = [Requirement(line) for line in lines if line]
    mine = [pin for pin in known if pin.marker is None or pin.marker.evaluate()]
    assert len({pin.name for pin in mine}) == len(mine), "a package is pinned twice"
    return {canonicalize_name(pin.name): pin for pin in mine}


def test_constraints_are_exact_pins_alone():
    for pin in pins().values():
        (version,) = pin.specifier
        assert version.operator == "==" and "*" not in version.version, f"{pin}"
        assert not pin.url and not pin.extras, f"{pin}: pip takes no such constraint"
    assert "://" not in (ROOT / "constraints.txt").read_text(), "names an index"


@pytest.mark.parametrize("extra", [None, *EXTRAS])
def test_each_requirement_is_pinned_within_its_range(extra):
    for requirement in map(Requirement, EXTRAS[extra] if extra else PROJECT["dependencies"]):
        if requirement.name == PROJECT["name"]:
            continue
        pin = pins().get(canonicalize_name(requirement.name))
        assert pin, f"constraints.txt lacks {requirement.name}: run `make pins`"
        (version,) = pin.specifier
        satisfied = requirement.specifier.contains(version.version, prereleases=True)
        assert satisfied, f"{pin} is not within {requirement}: run `make pins`"


def test_extras_agree():
    """A distribution has one range, in whichever extra it stands."""
    ranges = {}
    for line in [line for lines in EXTRAS.values() for line in lines]:
        assert ranges.setdefault(Requirement(line).name, line) == line


def test_make_installs_with_the_pins_of_all_extras():
    """`make pins` reads every extra except gpu, whose wheels are not pinned."""
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"(?m)^INSTALL := .* \$\(CONSTRAIN\)$", makefile)
    assert len(re.findall(r"\$\(INSTALL\) -r ", makefile)) == 2
    read = set(re.findall(r"--extra (\w+)", makefile))
    assert "onejit[tools]" in EXTRAS["dev"] and read | {"gpu", "tools"} == set(EXTRAS)


@each_script
def test_what_is_imported_stands_at_the_top_and_is_no_sibling(path):
    """And each core of a CPU is made a device before JAX is imported, which reads it then."""
    source = path.read_text()
    nodes = ast.walk(ast.parse(source))
    functions = [node for node in nodes if isinstance(node, (ast.FunctionDef, ast.Lambda))]
    assert not imports(inner for function in functions for inner in ast.walk(function))
    assert source.index('"JAX_NUM_CPU_DEVICES"') < source.index("\nimport jax\n")
    siblings = {file.stem for file in SCRIPTS} | {"onejit", "benchmarks", "tests"}
    assert not siblings & top_names(source)
    assert "" not in top_names(source), "a relative import"


# Configs


@pytest.mark.parametrize("path", CONFIGS, ids=lambda file: str(file.relative_to(ROOT / "configs")))
def test_config_can_be_run(path):
    assert path.suffix == ".yaml", "configs holds only configs/SCRIPT/NAME.yaml"
    assert path.parent.parent == ROOT / "configs"
    assert path.parent.name in {file.stem for file in SCRIPTS}, "no such script"
    script = importlib.import_module(path.parent.name)
    config = read_config(script, path)
    assert yaml.safe_load(path.read_text()), "sets nothing"
    assert config.num_updates > 0
