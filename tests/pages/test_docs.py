"""The README and docs/: commands, examples that run, links, functions and figures.

Every line of a fence without a language, or with bash or sh, is a command: what programs print
stands in ```text. Its flags are parsed by the program itself, in the fast tier without training;
scripts and onejit train run in the slow tier, a few updates of each, and after them the page's
Python examples, in one directory. A comment at the end of a line, or on a line of its own at the
top of a fence for all that follow, says what a command needs that tests have not. A run that a
command reads is written by a command above it on the page:

    onejit train ppo --num-seeds 1024 --distributed   # needs several hosts
"""

import ast
import dataclasses
import fnmatch
import functools
import glob
import importlib.util
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import unicodedata
from pathlib import Path
from unittest import mock

import pytest
import tyro
import yaml
from support.compilation import QUICKLY
from support.files import ROOT, SCRIPTS, repository_files

from onejit.__main__ import COMMANDS, MODULE_OF
from onejit.script import command_line, load
from onejit.train.options import Options

GUIDE = repository_files("docs/*.md")  # the pages of the site
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *GUIDE, *repository_files("dev/*.md")]
CONFIGS = repository_files("configs/**/*.yaml")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
FENCE = re.compile(r"(?ms)^```([^\n]*)\n(.*?)^```[ ]*$")
NEEDS = re.compile(r"#.*\bneeds? (a|an|the|several) (GPU|hosts|network|login)\b")
PLACEHOLDER = re.compile(r"\b[A-Z][A-Z_]{2,}\b")  # RUN_DIR and the like

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)


def fences(page: Path, *languages: str) -> list[str]:
    """The fences of a page in these languages, in order."""
    return [
        text for language, text in FENCE.findall(page.read_text()) if language.strip() in languages
    ]


def commands(fence: str) -> list[tuple[str, str]]:
    """`(command, what it needs)` of the lines, without comments, continued lines joined."""
    found, whole = [], ""
    for line in re.sub(r"\\\n\s*", "", fence).splitlines():
        need = NEEDS.search(line)
        if line.lstrip().startswith("#"):
            whole = need[2] if need else whole
        elif line.strip():
            try:
                command = shlex.join(shlex.split(line, comments=True))
            except ValueError:  # as of what a program printed, which is no command
                command = f"'{line.replace(chr(39), '')}'"
            found.append((command, need[2] if need else whole))
    return found


def commands_of(page: Path) -> list[tuple[str, str]]:
    return [each for fence in fences(page, "", "bash", "sh") for each in commands(fence) if each[0]]


# Commands: what each program says to the words after its name


def without_config_of_a_run(words):
    """A config that a run or a sweep is to write is not there."""
    at = words.index("--config") if "--config" in words else None
    return (
        words[:at] + words[at + 2 :]
        if at is not None and words[at + 1].startswith("runs/")
        else words
    )


def copies(page: Path) -> dict[str, str]:
    """What the page has the reader copy: {"my.py": "ppo.py"}."""
    given = [shlex.split(command) for command, _ in commands_of(page)]
    return {words[2]: words[1] for words in given if words[0] == "cp"}


def test_runs_that_a_page_reads_are_written_above():
    """`runs/...` of a command is the `--run-dir` or `--out` of an earlier one, or a part of it."""
    unknown = []
    for page in PAGES:
        written = []
        for command, _ in commands_of(page):
            new = []
            for before, word in itertools.pairwise(shlex.split(command)):
                path = word.rpartition("=")[2]
                if before in ("--run-dir", "--out", "--local-dir", "--storage"):
                    new.append(path)
                elif path.startswith("runs/") and not any(is_part(path, run) for run in written):
                    unknown.append(f"{page.name}: {command}: {path}")
            written += new
    assert not unknown


def is_part(path: str, run_dir: str) -> bool:
    return path == run_dir or path.startswith(f"{run_dir}/") or fnmatch.fnmatch(run_dir, path)


def parse_script(name, words):
    """As the script does it."""
    script = load.load_script(name)

    @functools.wraps(script.main)
    def parsed(*args, **kwargs):
        """Nothing begins."""

    markers = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagConversionOff)
    words = script.read_flags(without_config_of_a_run(words))
    tyro.cli(parsed, args=words, config=markers)


def parse_tool(name, words):
    assert name in COMMANDS, f"onejit has no command {name}"
    tool = importlib.import_module(MODULE_OF[name])
    if not words or "--help" in words:  # its name, in a text
        return
    words = without_config_of_a_run(words)
    if name not in ("train", "sweep"):
        command_line.read(tool.main, command_line.split_flags(words), {})
        return
    if words[1:]:
        with mock.patch("onejit.engine.hosts.connect"):  # to other hosts
            (tool.read_sweep if name == "sweep" else tool.read_training)(words)


def check_flags_of_program(file, words):
    """Of a program of the repository: it names each flag."""
    source = (ROOT / file).read_text()
    for word in words:
        flag = word.partition("=")[0]
        assert not flag.startswith("--") or flag in source, f"{file} knows no {flag}"


def parse_pip(words):
    for word in words:
        assert not word.endswith(".txt") or (ROOT / word).is_file(), f"no file {word}"
        extras = re.fullmatch(r"\.\[([\w,]+)\]", word)
        assert not extras or set(extras[1].split(",")) <= set(EXTRAS), word


def check(command: str, monkeypatch, copied: dict[str, str] | None = None) -> None:
    """Raise where a command cannot be given like that. Nothing is trained, installed or written."""
    monkeypatch.chdir(ROOT)
    for name, original in (copied or {}).items():
        command = re.sub(
            rf"(?<!\S){re.escape(name.removesuffix('.py'))}(\.py)?(?!\S)", rf"{original}", command
        )
    words = shlex.split(command)
    while re.fullmatch(r"\w+=\S*", words[0]):  # of the environment
        words = words[1:]
    program, words = words[0].removeprefix(".venv/bin/"), words[1:]
    if program == "srun":
        program, words = words[0], words[1:]
    if program in ("python", "python3", "uv"):
        if program == "uv":
            assert words[0] == "run"
            words = words[3:] if words[1] == "--with" else words[1:]
        file, words = words[0], words[1:]
        if file == "-m":
            assert words[0] in ("venv", "pytest", "pip", "mkdocs", "onejit"), words
        elif file == "-c":
            compile(words[0], "-c", "exec")
        elif file != "benchmarks/plan":  # which reads no flags of its own
            assert (ROOT / file).is_file(), f"no file {file}"
            folder, stem = Path(file).parent.name, Path(file).stem
            if "--help" in words:
                return
            if folder in ("benchmarks", "pages", "stress", "tools"):
                check_flags_of_program(file, words)
            elif folder == "examples":
                monkeypatch.syspath_prepend(ROOT / folder)
                importlib.import_module(stem).read_words(words)
            else:
                parse_script(stem, words)
    elif program == "onejit":
        if words not in ([], ["--help"]):
            parse_tool(words[0], words[1:])
    elif program == "make":
        targets = re.findall(r"(?m)^([a-z][a-z-]*):", (ROOT / "Makefile").read_text())
        assert set(words) <= set(targets), f"of these targets the Makefile lacks some: {words}"
    elif program == "pip":
        parse_pip(words)
    elif program in ("diff", "cp"):
        assert (ROOT / words[0]).is_file(), words
    else:
        assert program in ("source", "git", "cd", "if", "else", "fi", "hf"), (
            f"{program}: neither known here nor marked by what it needs"
        )


def patched(source: str, diff: str) -> str:
    """A script after a diff without line numbers, whose other lines must be there in this order."""
    lines = source.splitlines()
    at = 0
    for line in diff.splitlines():
        if line.startswith("+"):
            lines.insert(at, line[1:])
        else:
            assert line[1:] in lines[at:], f"ppo.py has no such line here: {line}"
            at = lines.index(line[1:], at)
            if line.startswith("-"):
                del lines[at]
                continue
        at += 1
    return "\n".join([*lines, ""])


@pytest.mark.parametrize("page", [page for page in PAGES if fences(page, "diff")])
def test_diffs_of_a_script_can_be_typed(page, tmp_path):
    """And the names that they use are defined."""
    for number, diff in enumerate(fences(page, "diff")):
        if "@@" not in diff:
            copy = tmp_path / f"copy_{number}.py"
            copy.write_text(patched((ROOT / "ppo.py").read_text(), diff))
            words = ["check", "--isolated", "--select", "F", "--ignore", "F401", copy]
            subprocess.run([sys.executable, "-m", "ruff", *words], check=True)


def commands_in_text(page: Path) -> list[str]:
    """Those in backticks that begin with `python` or `onejit`, without placeholders or dots."""
    text = FENCE.sub("", page.read_text())
    found = [" ".join(each.split()) for each in re.findall(r"`((?:python|onejit) [^`]+)`", text)]
    return [each for each in found if not PLACEHOLDER.search(each) and "..." not in each]


@each_page
def test_commands_can_be_given(page, monkeypatch):
    for command in [command for command, _ in commands_of(page)] + commands_in_text(page):
        with monkeypatch.context() as patch:
            try:
                check(command, patch, copies(page))
            except (SystemExit, Exception) as error:
                raise AssertionError(f"{page.name}: {command}: {error!r}") from error


@pytest.mark.parametrize("path", CONFIGS, ids=lambda file: str(file.relative_to(ROOT / "configs")))
def test_commands_of_configs_can_be_given(path, monkeypatch):
    for line in re.findall(r"(?m)^#     (.*)$", path.read_text()):
        if not PLACEHOLDER.search(line):
            with monkeypatch.context() as patch:
                check(line, patch)


@pytest.mark.parametrize(
    "command",
    [
        "python ppo.py --no-such-flag 1",
        "onejit sweep ppo --no-such-flag 1 2",
        "onejit compare runs/a --no-such-flag",
        "python benchmarks/scaling.py seeds --no-such-flag",
        "make no-such-target",
    ],
)
def test_a_command_that_is_wrong_is_seen(command, monkeypatch):
    with pytest.raises((AssertionError, ValueError, SystemExit, OSError)):
        check(command, monkeypatch)


# Commands and Python examples, run


def small_budget(file: str, words: list[str]) -> list[str]:
    """Flags that make a training short, after those that are given: later ones win."""
    is_tool = file == "train"
    name, flags = (words[0], words[1:]) if is_tool else (file, words)
    script = load.load_script(name)
    config, _, _ = command_line.parse_with(
        script, command_line.split_flags(flags), Options, description=""
    )
    if hasattr(config, "num_generations"):
        steps = str(2 * config.inner_envs * config.inner_steps)
        few = "--num-generations 2 --population-size 4 --num-slices 1 --inner-seeds 1"
        return [*few.split(), "--fitness-episodes", "1", "--total-timesteps", steps]
    warmup, steps = getattr(config, "warmup_timesteps", 0), config.num_envs * config.num_steps
    small = ["--total-timesteps", str(warmup + 2 * steps), "--num-seeds", "2"]
    if getattr(config, "snapshot_interval", 0):
        small = ["--total-timesteps", "20000", "--num-seeds", "2"]
    if "--eval-interval" in words:
        small += ["--eval-interval", "1"]
    return small + (["--eval-episodes", "1"] if is_tool else [])


def needed(text: str) -> str:
    """The package that an environment of onejit.envs in a command or config needs."""
    module = re.search(r"onejit\.envs\.(\w+):", text)
    return {"playground": "mujoco_playground"}.get(module[1], module[1]) if module else "jax"


def can_run(command: str, folder: Path) -> bool:
    """Whether it trains a script, or compares runs, with packages and files that are there.

    `--config` of a sweep is a file of the reader's.
    """
    words = shlex.split(command)
    if words[:2] == ["onejit", "list"]:
        return True
    if words[:2] == ["onejit", "compare"]:
        runs = [word.rpartition("=")[2] for word in words[2:] if word.startswith("runs/")]
        return all(glob.glob(str(folder / path)) for path in runs)
    file, place = words[1], words.index("--config") + 1 if "--config" in words else 0
    is_tool = words[0] == "onejit"
    if (
        not (
            words[:2] in (["onejit", "train"], ["onejit", "resume"])
            or (file.endswith(".py") and "/" not in file)
        )
        or "--help" in words
        or "RUN_DIR" in words
    ):
        return False
    if words[:2] == ["onejit", "resume"]:
        return (folder / words[2] / "run.json").exists()
    if is_tool and "/" in words[2]:  # a script of the reader's
        return False
    if place:
        config = folder / words[place]
        if not config.exists():
            return False
        command += config.read_text()
    return bool(importlib.util.find_spec(needed(command)))


@pytest.mark.slow
@each_page
def test_page_runs(page, tmp_path, monkeypatch):
    """All commands that train or compare, then all Python examples, in the page's order.

    A page that copies a script has an empty folder with this script, any other one a clone.
    """
    copied = set(copies(page).values())
    # Copies instead of links: Python looks for modules in the folder that a link leads to.
    for name in copied or [f"{name}.py" for name in SCRIPTS]:
        shutil.copy(ROOT / name, tmp_path)
    for name in () if copied else ("configs", "onejit", "benchmarks", "docs", "agents", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    environment = {"XLA_FLAGS": QUICKLY, "PYTHONPATH": str(ROOT)} | os.environ
    environment |= {"JAX_NUM_CPU_DEVICES": "2", "WANDB_MODE": "offline", "MPLBACKEND": "agg"}

    def run(*words):
        done = subprocess.run(
            [sys.executable, *words], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, (
            f"{shlex.join(words)}\n{done.stdout[-1000:]}{done.stderr[-3000:]}"
        )

    is_file = re.compile(r'"""(\w+\.py):')  # an example that says what file it is
    for text in fences(page, "python"):
        if named := is_file.match(text):
            (tmp_path / named[1]).write_text(text)
    for command, need in dict.fromkeys(commands_of(page)):
        words = shlex.split(command)
        if words[0] == "cp":
            subprocess.run(words, check=True)
        elif words[0] in ("python", "onejit") and not need and can_run(command, tmp_path):
            program = ["-m", "onejit"] if words[0] == "onejit" else []
            if words[1] in ("resume", "list", "compare"):
                for word in words[1:]:
                    program += glob.glob(word) if "*" in word else [word]
                run(*program)
            else:
                run(*program, *words[1:], *small_budget(words[1], words[2:]))
    examples = "\n".join(text for text in fences(page, "python") if not is_file.match(text))
    if examples:
        for long, short in {
            "total_timesteps=100_000": "total_timesteps=10_000",
            ", 256)": ", 4)",
        }.items():
            examples = examples.replace(long, short)
        (tmp_path / "examples.py").write_text(examples)
        run("examples.py")


@each_page
def test_python_examples_name_what_there_is(page):
    """They can be compiled, and what they import of the scripts and tools is there."""
    for text in fences(page, "python"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (ROOT / f"{node.module}.py").exists():
                module = importlib.import_module(node.module)
                assert not [each.name for each in node.names if not hasattr(module, each.name)]


# Links


def anchors(path: Path) -> set[str]:
    """Of the headings of a page, as they are made of their text."""
    if path.suffix != ".md":
        return set()
    headings = re.findall(r"(?m)^#+ (.*)$", FENCE.sub("", path.read_text()))
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)|[`*\\]", r"\1", each) for each in headings]
    plain = [unicodedata.normalize("NFKD", each).lower().strip() for each in plain]
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", each)) for each in plain}


@each_page
def test_links_lead_somewhere(page):
    text = FENCE.sub("", page.read_text())
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"\w+:", link):
            continue
        name, _, anchor = link.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(path), f"{page.name}: {link}"


def test_every_page_is_in_the_navigation():
    class Loader(yaml.SafeLoader):
        pass

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    nav = str(yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"])
    index = (ROOT / "docs" / "index.md").read_text()
    for page in GUIDE:
        assert f"'{page.name}'" in nav, f"mkdocs.yml lacks {page.name}"
        assert page.name == "index.md" or f"{page.name})" in index, (
            f"docs/index.md lacks {page.name}"
        )


def test_no_file_names_a_page_that_is_gone():
    """In the code, the configs and the pages, whatever the folder: docs or dev."""
    for path in repository_files("**/*"):
        if path.name == "CHANGELOG.md" or path.suffix in (".png", ".gif", ".safetensors", ".npz"):
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        for name in re.findall(r"(?<![\w/])((?:docs|dev)/[\w/]+\.(?:md|ipynb))\b", text):
            assert (ROOT / name).exists(), f"{path.relative_to(ROOT)}: {name}"


def test_the_guide_stays_short():
    """What is written by hand: without the tables that programs write."""
    generated = re.compile(r"(?s)<!-- (\w+): .*?<!-- \1: end -->")
    words = sum(len(generated.sub("", page.read_text()).split()) for page in GUIDE)
    assert words < 34_500


def test_measured_numbers_are_current():
    """What benchmarks/guide.py writes between its markers."""
    command = [sys.executable, ROOT / "benchmarks" / "guide.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# What pages say of environments


def test_environment_names_are_current():
    """Names of gymnax and brax, in a process of its own: other tests register more names."""
    command = [sys.executable, ROOT / "tools" / "pages" / "environment_names.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# What pages say of scripts


def definitions(name: str) -> set[str]:
    """The functions and classes of a script, at any depth."""
    nodes = ast.walk(ast.parse((ROOT / f"{name}.py").read_text()))
    return {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def fields(name: str) -> set[str]:
    return {field.name for field in dataclasses.fields(importlib.import_module(name).Config)}


def section_of(name: str) -> str:
    """The text below the heading `## NAME.py`, in whichever page it stands."""
    found = []
    for page in GUIDE:
        parts = re.split(rf"(?m)^## {name}\.py$", page.read_text())
        found += [re.split(r"(?m)^## ", part)[0] for part in parts[1:]]
    assert len(found) == 1, f"{len(found)} pages have a section on {name}.py"
    return found[0]


def function_column(text: str) -> list[str]:
    """The cells below the heading `function` of all tables."""
    cells, column = [], None
    for line in text.splitlines():
        row = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not row:
            column = None
        elif column is None:
            column = row.index("function") if "function" in row else -1
        elif column >= 0 and not set(line) <= set("|-: "):
            cells.append(row[column])
    return cells


@pytest.mark.parametrize("name", SCRIPTS)
def test_functions_of_the_section_are_there(name):
    """Each in backticks is a function or a class of the script, or a field of its Config."""
    section = section_of(name)
    known = definitions(name) | fields(name)
    leads = re.findall(r"(?m)^\*\*[A-Z][^*\n]*\*\*\.? \(([^)\n]*)\)", section)
    named = re.findall(r"`([^`]+)`", " ".join([*function_column(section), *leads]))
    assert set(named) <= known, f"{name}.py has not: {set(named) - known}"


@pytest.fixture(scope="module")
def hooks():
    """tools/pages/hooks.py: what the built site has and the files have not."""
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "tools" / "pages" / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_cells_of_the_site_know_the_names_of_their_columns(hooks):
    head = "<thead><tr><th>script</th><th><code>a</code> &lt; b</th></tr></thead>"
    page = f"<table>{head}<tbody><tr><td>ppo</td><td></td></tr></tbody></table><td>"
    cells = '<td data-column="script">ppo</td><td data-column="a &lt; b"></td>'
    assert hooks.with_column_names(page) == page.replace("<td>ppo</td><td></td>", cells)


@pytest.mark.parametrize("name", SCRIPTS)
def test_functions_of_the_site_link_to_their_lines(name, hooks):
    """In the built site the names of functions lead to where they are defined."""
    lines = (ROOT / f"{name}.py").read_text().splitlines()
    page = hooks.link_functions(f"## {name}.py\n{section_of(name)}")
    source = rf"source/{name}\.py\.html"
    links = re.findall(rf'<a href="{source}#__codelineno-0-(\d+)">`(\w+)`</a>', page)
    assert len(links) >= 3
    for line, function in links:
        assert re.match(rf"\s*(def|class) {function}\b", lines[int(line) - 1]), function
