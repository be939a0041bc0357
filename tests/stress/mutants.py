"""Make plausible mistakes in a file, one at a time, and see which tests notice.

    python tests/stress/mutants.py td3.py
    python tests/stress/mutants.py onejit/sweep/swept.py --tests tests/sweep/test_sweep.py
    python tests/stress/mutants.py td3.py --survivors
    python tests/stress/mutants.py

A mutant is the file with one change of its syntax tree: an operator, comparison or sign, `minimum`
for `maximum`, swapped branches, a dropped `stop_gradient`, another key, `target_params` for
`params`, a doubled constant, a dropped statement. Messages and annotations are left alone. In a
script, the changes lie between the banners of the mathematics and of the environments, and a mutant
counts if the program of a fast config in the script's twin can be lowered and differs from the
script's own. In a module a mutant counts if the tests can import it. Mutants are drawn at random
until `--count` of them count or `--minutes` are over.

All tests run for each mutant, in a copy of the repository. `--tests` has the arguments of pytest.
Without it they are those of the last time, and at first the script's twin and its test file.

tests/stress/mutants.json has for each file the commit that changed it last, how many mutants there
were and were killed, the survivors, how many mutants each test killed (`tests`), and how many that
no other test killed (`alone`). Whoever finds that a survivor computes the same as the file writes
the reason into its `no_effect`. Without a file this program prints a summary, and exits with 1 if
under 95 % of the scripts' mutants that have an effect are killed, or under 90 % of the package's.

.cache/mutants has every result, so that a run that was stopped goes on. `--survivors` makes those
that survived run again, with tests that have changed.
"""

import argparse
import ast
import builtins
import copy
import hashlib
import importlib
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections import Counter
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "scripts")]
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "1")

SUMMARY = ROOT / "tests" / "stress" / "mutants.json"
CACHE = ROOT / ".cache" / "mutants"
OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
COMPARISONS = {
    ast.Lt: ast.GtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
NAMES = [
    ("params", "target_params"),
    ("terminated", "truncated"),
    ("obs", "next_obs"),
    ("minimum", "maximum"),
    ("min", "max"),
    ("argmin", "argmax"),
    ("any", "all"),
    ("floor", "ceil"),
    ("mean", "sum"),
    ("log_prob", "next_log_prob"),
    ("value", "next_value"),
    ("values", "next_values"),
    ("q", "next_q"),
    ("next_q", "next_q_online"),
    ("policy_lr", "q_lr"),
    ("gamma", "gae_lambda"),
    ("advantage", "target"),
]


# --- mutants ---


class Mutant:
    """One change: `apply` makes it in the node number `index` of the tree, in the order of walk."""

    def __init__(self, index: int, line: int, change: str, apply):
        self.index = index
        self.line = line
        self.change = change
        self.apply = apply

    def source(self, text: str) -> str:
        """The text with the change. All else in it stays, because tests may compare functions."""
        node = list(ast.walk(ast.parse(text)))[self.index]
        lines = text.encode().splitlines(keepends=True)  # columns are those of bytes
        start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
        end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
        is_expression = isinstance(node, ast.expr)
        indent = "\n" + " " * node.col_offset
        self.apply(node)
        changed = ast.unparse(ast.fix_missing_locations(node)).replace("\n", indent)
        if is_expression:
            changed = f"({changed})"
        return (text.encode()[:start] + changed.encode() + text.encode()[end:]).decode()


def name_of(node):
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    return None


def rename(node, name: str) -> None:
    if isinstance(node, ast.Name):
        node.id = name
    else:
        node.attr = name


def become(node, other) -> None:
    """Turn `node` into the node `other`, in place."""
    node.__class__ = other.__class__
    node.__dict__ = other.__dict__


def has_text(node) -> bool:
    """Whether it joins texts or paths."""
    for part in ast.iter_child_nodes(node):
        if isinstance(part, ast.JoinedStr) or isinstance(getattr(part, "value", None), str):
            return True
    return False


def changes_of(node, is_condition: bool, names: set[str], keys: list[str], assigned: set[str]):
    """`(change, apply)` for each change of one node.

    `is_condition`: the node is that of an `if`. `names` are all of the file and of libraries.
    `keys` are random keys of the function that the node is in, and `assigned` are variables of it
    that have another value before.
    """
    has_operator = isinstance(node, (ast.BinOp, ast.AugAssign, ast.BoolOp))
    if has_operator and type(node.op) in OPERATORS and not has_text(node):
        other = OPERATORS[type(node.op)]
        yield f"{type(node.op).__name__} -> {other.__name__}", lambda n: setattr(n, "op", other())

    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        other = COMPARISONS[type(node.ops[0])]
        change = f"{type(node.ops[0]).__name__} -> {other.__name__}"
        yield change, lambda n: setattr(n, "ops", [other(), *n.ops[1:]])

    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Invert, ast.Not)):
        yield f"no {type(node.op).__name__}", lambda n: become(n, n.operand)

    if is_condition and isinstance(node, (ast.Name, ast.Attribute, ast.Call)):
        yield "if -> if not", lambda n: become(n, ast.UnaryOp(ast.Not(), copy.copy(n)))

    if isinstance(node, ast.IfExp):

        def swap_branches(n):
            n.body, n.orelse = n.orelse, n.body

        yield "swapped branches of if", swap_branches

    if isinstance(node, ast.Call):
        function = name_of(node.func)
        if function == "where" and len(node.args) == 3:

            def swap_where(n):
                n.args[1], n.args[2] = n.args[2], n.args[1]

            yield "swapped branches of where", swap_where
        if function == "stop_gradient":
            yield "no stop_gradient", lambda n: become(n, n.args[0])
        if function == "clip" and len(node.args) == 3:
            yield "no clip", lambda n: become(n, n.args[0])

    if isinstance(node, ast.Constant):
        if type(node.value) is bool:
            yield "other truth value", lambda n: setattr(n, "value", not n.value)
        elif type(node.value) in (int, float):
            yield "doubled constant", lambda n: setattr(n, "value", 2 * n.value or 1)

    if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load):
        name = name_of(node)
        for pair in NAMES:
            if name in pair:
                other_name = pair[1 - pair.index(name)]
                if other_name in names:
                    yield f"{name} -> {other_name}", lambda n, other=other_name: rename(n, other)
        if isinstance(node, ast.Name) and name in keys:
            for key in keys:
                if key != name:
                    yield f"{name} -> {key}", lambda n, key=key: rename(n, key)

    if isinstance(node, (ast.Assign, ast.AugAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if {name_of(target) for target in targets} <= assigned or isinstance(
            targets[0], (ast.Subscript, ast.Attribute)
        ):
            yield "dropped statement", lambda n: become(n, ast.Pass())

    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "dropped call", lambda n: become(n, ast.Pass())


def without_effect(tree) -> set:
    """The nodes of annotations and messages."""
    parts = []
    for node in ast.walk(tree):
        parts.append(getattr(node, "annotation", None))
        parts.append(getattr(node, "returns", None))
        if isinstance(node, (ast.JoinedStr, ast.Raise, ast.Assert)):
            parts.append(node)
    return {node for part in parts if part for node in ast.walk(part)}


def mutants_of(text: str, first: int, last: int) -> list[Mutant]:
    """All mutants of the functions between two lines."""
    tree = ast.parse(text)
    left_alone = without_effect(tree)
    names = {*dir(builtins), *dir(np)} | {name_of(node) for node in ast.walk(tree)}
    conditions = {node.test for node in ast.walk(tree) if isinstance(node, ast.If)}
    function_of = {}
    for function in ast.walk(tree):  # outer functions come first, so that the innermost wins
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                function_of[node] = function

    mutants = []
    for index, node in enumerate(ast.walk(tree)):
        line = getattr(node, "lineno", 0)
        function = function_of.get(node)
        if not first < line < last or function is None or node in left_alone:
            continue
        if function.name == "make_train":
            continue
        inside = list(ast.walk(function))
        stored = [n.id for n in inside if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        arguments = [n.arg for n in inside if isinstance(n, ast.arg)]
        keys = [name for name in dict.fromkeys(stored + arguments) if name.endswith("key")]
        assigned = {name for name in stored if stored.count(name) > 1} | set(arguments)
        for change, apply in changes_of(node, node in conditions, names, keys, assigned):
            mutants.append(Mutant(index, line, change, apply))
    return mutants


# --- whether a mutant of a script counts ---


def fast_configs(tests) -> list:
    """The configs of the cases of a twin that are not slow."""
    (mark,) = [mark for mark in tests.test_twin.pytestmark if mark.name == "parametrize"]
    slow = [case.values[0] for case in mark.args[1] if hasattr(case, "marks")]
    return [config for case, config in tests.CASES.items() if case not in slow]


def load(source: str, file: str):
    """The source of a mutant as a module."""
    module = types.ModuleType("mutant")
    module.__file__ = str(ROOT / file)
    sys.modules["mutant"] = module  # dataclasses and type hints look it up
    exec(compile(source, module.__file__, "exec"), module.__dict__)
    return module


def lowered(script, configs) -> list[str]:
    import jax

    key = jax.eval_shape(lambda: jax.random.key(0))
    programs = []
    for config in configs:
        init, update = script.make_learner(script.Config(**vars(config)))
        state = jax.eval_shape(init, key)
        programs += [jax.jit(init).lower(key).as_text(), jax.jit(update).lower(state).as_text()]
    return programs


class Script:
    """The part of a script that has mutants, and what its programs look like without them."""

    def __init__(self, file: str, text: str):
        lines = text.splitlines()
        self.file = file
        self.first = next(i for i, x in enumerate(lines, 1) if x.startswith("# --- mathematics"))
        self.last = next(i for i, x in enumerate(lines, 1) if x.startswith("# --- environment"))
        tests = importlib.import_module(f"test_{Path(file).stem}_twin")
        self.configs = fast_configs(tests)
        self.programs = lowered(load(text, file), self.configs)

    def counts(self, source: str) -> bool:
        try:
            return lowered(load(source, self.file), self.configs) != self.programs
        except Exception:  # of any kind: what cannot be traced is no silent mistake
            return False


class Module:
    """A module of the package: all of it has mutants, and the tests say whether they count."""

    first = 0
    last = sys.maxsize

    def counts(self, source: str) -> bool:
        return True


# --- tests ---


class Tests:
    """The tests of a file, in a copy of the repository."""

    def __init__(self, directory: str, file: str, arguments: str):
        self.copy = Path(directory, "repository")
        self.file = file
        self.arguments = shlex.split(arguments)
        self.limit = None  # in seconds
        ignored = shutil.ignore_patterns(".*", "runs", "site", "figures")
        shutil.copytree(ROOT, self.copy, ignore=ignored)
        start = time.monotonic()
        exit_code, results = self.run((ROOT / file).read_text())
        if exit_code:
            raise SystemExit(f"The tests fail without a mutant: {results}")
        self.names = list(results)
        self.limit = 120 + 5 * (time.monotonic() - start)

    def run(self, source: str) -> tuple[int, dict]:
        """The exit code of pytest and `{test: PASSED, FAILED or ERROR}`."""
        (self.copy / self.file).write_text(source)
        environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PYTHONPATH")}
        environment["JAX_COMPILATION_CACHE_DIR"] = str(CACHE / "programs")
        environment["JAX_COMPILATION_CACHE_MAX_SIZE"] = str(2**30)
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", "--tb=no", "-rpfE", "-n", "0", *self.arguments],
            cwd=self.copy,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=self.limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that tests have started
            process.communicate()
            return 1, {"(does not end)": "FAILED"}
        if process.returncode < 0:
            return 1, {"(crash)": "FAILED"}
        pattern = r"^(PASSED|FAILED|ERROR) (tests/\S+::\w+(?:\[.*?\])?)(?: - .*)?$"
        found = re.findall(pattern, output, re.MULTILINE)
        return process.returncode, {test: result for result, test in found}

    def killers(self, source: str) -> list[str] | None:
        """The tests that fail. None: they cannot be collected."""
        exit_code, results = self.run(source)
        if exit_code not in (0, 1):
            return None
        failed = sorted(test for test, result in results.items() if result != "PASSED")
        assert bool(failed) == bool(exit_code), results
        return failed


# --- results ---


def read_summary() -> dict:
    return json.loads(SUMMARY.read_text()) if SUMMARY.exists() else {}


def write_summary(file: str, arguments: str, tests: list[str], records: list[dict]) -> None:
    """Put the results of one file into mutants.json, with the reasons that are written there."""
    summary = read_summary()
    old = summary.get(file, {"survivors": []})["survivors"]
    reasons = {(x["change"], x["text"]): x["no_effect"] for x in old}
    command = ["git", "log", "-1", "--format=%h", "--", file]
    killed = [record for record in records if record["killed_by"]]
    kills = Counter(test for record in killed for test in record["killed_by"])
    alone = Counter(r["killed_by"][0] for r in killed if len(r["killed_by"]) == 1)
    summary[file] = {
        "commit": subprocess.check_output(command, cwd=ROOT, text=True).strip(),
        "arguments": arguments,
        "mutants": len(records),
        "killed": len(killed),
        "survivors": [
            {
                "line": record["line"],
                "change": record["change"],
                "text": record["text"],
                "no_effect": reasons.get((record["change"], record["text"]), ""),
            }
            for record in records
            if not record["killed_by"]
        ],
        "tests": {test: kills[test] for test in sorted({*tests, *kills})},
        "alone": dict(sorted(alone.items())),
    }
    SUMMARY.write_text(json.dumps(summary, indent=1, sort_keys=True) + "\n")


def arguments_of(file: str) -> str:
    """The arguments of pytest: those of the last time, or a script's twin and its test file."""
    recorded = read_summary().get(file)
    if recorded:
        return recorded["arguments"]
    name = Path(file).stem
    names = [f"tests/scripts/test_{name}_twin.py", f"tests/scripts/test_{name}.py"]
    found = [path for path in names if (ROOT / path).exists()]
    if not found:
        raise SystemExit(f"Which tests does {file} have? --tests says it.")
    return " ".join(found)


def run_file(file: str, arguments: str, options) -> None:
    end = time.monotonic() + 60 * options.minutes
    text = (ROOT / file).read_text()
    part = Script(file, text) if "/" not in file else Module()
    mutants = mutants_of(text, part.first, part.last)
    random.Random(options.seed).shuffle(mutants)

    path = CACHE / f"{file.replace('/', '.')}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_text().splitlines() if path.exists() else []
    results = {record["source"]: record for record in map(json.loads, lines)}
    if options.survivors:
        results = {key: r for key, r in results.items() if r["killed_by"] != []}

    counted = []
    with tempfile.TemporaryDirectory() as directory:
        tests = Tests(directory, file, arguments)
        for mutant in mutants:
            if len(counted) == options.count or time.monotonic() > end:
                break
            source = mutant.source(text)
            digest = hashlib.sha256(ast.unparse(ast.parse(source)).encode()).hexdigest()[:16]
            record = results.get(digest)
            if record is None:
                record = {"source": digest, "line": mutant.line, "change": mutant.change}
                record["text"] = text.splitlines()[mutant.line - 1].strip()
                record["killed_by"] = tests.killers(source) if part.counts(source) else None
                with path.open("a") as cache:
                    cache.write(json.dumps(record) + "\n")
            if record["killed_by"] is None:  # does not count
                continue
            counted.append(record)
            result = f"killed by {len(record['killed_by'])}" if record["killed_by"] else "SURVIVED"
            print(f"{file}:{record['line']}: {record['change']}: {result}    {record['text']}")
            sys.stdout.flush()
    write_summary(file, arguments, tests.names, counted)


def report() -> int:
    """Print the summary. Returns the exit code."""
    shares = {"scripts": [0, 0], "package": [0, 0]}
    for file, entry in read_summary().items():
        without = [survivor for survivor in entry["survivors"] if survivor["no_effect"]]
        effective = entry["mutants"] - len(without)
        print(f"{file}: {entry['killed']} of {effective} killed, {len(without)} without effect")
        for survivor in entry["survivors"]:
            reason = f" ({survivor['no_effect']})" if survivor["no_effect"] else ""
            print(f"    {survivor['line']}: {survivor['change']}: {survivor['text']}{reason}")
        share = shares["package" if "/" in file else "scripts"]
        share[0] += entry["killed"]
        share[1] += effective
    for name, (killed, effective) in shares.items():
        print(f"{name}: {killed} of {effective} killed")
    scripts, package = shares.values()
    return int(scripts[0] < 0.95 * scripts[1] or package[0] < 0.9 * package[1])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", help="scripts or modules, from the top of the checkout")
    parser.add_argument("--tests", help="arguments of pytest")
    parser.add_argument("--count", type=int, default=20, help="mutants that count, per file")
    parser.add_argument("--minutes", type=float, default=60, help="at most so many, per file")
    parser.add_argument("--seed", type=int, default=0, help="of the order in which they are drawn")
    parser.add_argument("--survivors", action="store_true", help="run again those that survived")
    options = parser.parse_args()
    for file in options.files:
        run_file(file, options.tests or arguments_of(file), options)
    return 0 if options.files else report()


if __name__ == "__main__":
    raise SystemExit(main())
