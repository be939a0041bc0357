"""Make plausible mistakes in a script, one at a time, and see whether its tests notice.

    python tests/stress/mutants.py ppo_continuous
    python tests/stress/mutants.py dqn sac --count 40 --seed 0
    python tests/stress/mutants.py --report

A mutant is the script with one change of its syntax tree, in `make_learner` or in the mathematics:
an operator, comparison or sign, `minimum` for `maximum`, swapped branches of `where`, a dropped
`stop_gradient`, another key, `target_params` for `params`, `truncated` for `terminated`, `next_obs`
for `obs`, a doubled constant, a dropped statement. They are drawn at random until `--count` of them
count. A mutant counts if the program of a config in the script's twin can be lowered and differs
from the script's own. It is killed if the twin fails, or else the script's other fast tests.

The twin of the script itself runs once; what it computes is compared with each mutant.

Results are kept in .cache/mutants/SCRIPT.jsonl, a line for each mutant, and what is there is not
run again while this part of the script and the twin stay as they are. Exits with 1 if fewer than
95 % are killed.
"""

import argparse
import ast
import copy
import hashlib
import importlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "1")
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

from support.compilation import QUICKLY

os.environ["XLA_FLAGS"] = f"{QUICKLY} {os.environ.get('XLA_FLAGS', '')}"

import jax
from gymnax.wrappers.purerl import GymnaxWrapper
from support import twin

# Copies of a twin share its compiled functions and its environments, which have no state.
copy._deepcopy_dispatch[type(jax.jit(len))] = lambda function, memo: function
GymnaxWrapper.__deepcopy__ = lambda environment, memo: environment

RESULTS = ROOT / ".cache" / "mutants"
OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
COMPARISONS = {
    ast.Lt: ast.GtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
}
NAMES = [
    ("params", "target_params"),
    ("terminated", "truncated"),
    ("obs", "next_obs"),
    ("minimum", "maximum"),
    ("min", "max"),
    ("argmin", "argmax"),
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


class Mutant:
    """One change: `apply` makes it in the node number `index` of the tree, in the order of walk.

    `place` is its line below the banner of the mathematics and its column.
    """

    def __init__(self, index: int, line: int, place: str, what: str, apply):
        self.index = index
        self.line = line
        self.place = place
        self.what = what
        self.apply = apply

    def source(self, tree) -> str:
        changed = copy.deepcopy(tree)
        node = list(ast.walk(changed))[self.index]
        self.apply(node)
        return ast.unparse(ast.fix_missing_locations(changed))


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


def changes_of(node, keys: list[str], assigned: set[str]):
    """`(what, apply)` for each change of one node. `keys`: names of random keys in its function."""
    if isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in OPERATORS:
        other = OPERATORS[type(node.op)]
        yield f"{type(node.op).__name__} -> {other.__name__}", lambda n: setattr(n, "op", other())

    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        other = COMPARISONS[type(node.ops[0])]
        what = f"{type(node.ops[0]).__name__} -> {other.__name__}"
        yield what, lambda n: setattr(n, "ops", [other(), *n.ops[1:]])

    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Invert, ast.Not)):
        yield f"no {type(node.op).__name__}", lambda n: become(n, n.operand)

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

    if isinstance(node, ast.Constant) and type(node.value) in (int, float) and node.value:
        yield "doubled constant", lambda n: setattr(n, "value", 2 * n.value)

    if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load):
        name = name_of(node)
        for pair in NAMES:
            if name in pair:
                other_name = pair[1 - pair.index(name)]
                yield f"{name} -> {other_name}", lambda n, other=other_name: rename(n, other)
        if isinstance(node, ast.Name) and name in keys:
            for key in keys:
                if key != name:
                    yield f"{name} -> {key}", lambda n, key=key: rename(n, key)

    if isinstance(node, (ast.Assign, ast.AugAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = {name_of(target) for target in targets}
        if names <= assigned or isinstance(targets[0], ast.Subscript):
            yield "dropped statement", lambda n: become(n, ast.Pass())


def mutants_of(text: str) -> list[Mutant]:
    """All mutants between the banner of the mathematics and the banner of acting."""
    first, last = part_of(text)
    tree = ast.parse(text)
    function_of = {}
    for function in ast.walk(tree):  # outer functions come first, so that the innermost wins
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                function_of[node] = function

    mutants = []
    for index, node in enumerate(ast.walk(tree)):
        line = getattr(node, "lineno", 0)
        function = function_of.get(node)
        if not first < line < last or function is None or function.name == "make_train":
            continue
        inside = list(ast.walk(function))
        stored = [n.id for n in inside if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        arguments = [n.arg for n in inside if isinstance(n, ast.arg)]
        keys = [name for name in dict.fromkeys(stored + arguments) if name.endswith("key")]
        assigned = {name for name in stored if stored.count(name) > 1} | set(arguments)
        for what, apply in changes_of(node, keys, assigned):
            mutants.append(Mutant(index, line, f"{line - first}:{node.col_offset}", what, apply))
    return mutants


def load(source: str, name: str):
    """The source of a mutant as a module."""
    module = types.ModuleType(name)
    module.__file__ = str(ROOT / f"{name}.py")
    sys.modules["mutant"] = module  # dataclasses and type hints look it up
    module.__name__ = "mutant"
    exec(compile(source, module.__file__, "exec"), module.__dict__)
    return module


def lowered(script, config) -> str:
    init, update = script.make_learner(config)
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = jax.eval_shape(init, key)
    programs = [jax.jit(init).lower(key), jax.jit(update).lower(state)]
    return "\n".join(program.as_text() for program in programs)


def same_config(script, config):
    """The config of the original script as a config of the mutant."""
    return script.Config(**vars(config))


class Checks:
    """The fast cases of a script's twin, as checks of mutants.

    `check` stands in for `twin.check`. With the script itself it keeps copies of the twin after
    `init` and after each update; with a mutant it compares with them.
    """

    def __init__(self, script, tests):
        self.script = script
        self.tests = tests
        self.mutant = None
        self.copies = {}  # {config: [(metrics, copy of the twin), ...]}
        self.cases = fast_cases(tests.test_twin)
        self.configs = {}  # filled by `check`
        twin.check = self.check
        self.run(None)

    def run(self, mutant) -> None:
        """Raises AssertionError if the mutant is not the same as the twin."""
        self.mutant = mutant
        for case in self.cases:
            self.case = case
            self.tests.test_twin(case)

    def check(self, script, config, twin_class, num_updates: int = 3, seed: int = 0) -> None:
        rng = jax.random.key(seed)
        if self.mutant is None:
            self.configs[self.case] = config
            plain = twin_class(config, rng)
            copies = [({}, copy.deepcopy(plain))]
            for _ in range(num_updates):
                metrics = plain.update()
                copies.append((metrics, copy.deepcopy(plain)))
            self.copies[self.case] = copies

        script = self.mutant or self.script
        init, update = script.make_learner(same_config(script, config))
        update = jax.jit(update)
        state = jax.jit(init)(rng)
        (_, first), *others = self.copies[self.case]
        first.check(state)
        for expected, plain in others:
            state, metrics = update(state)
            twin.assert_metrics(metrics, expected)
            plain.check(state)


def fast_cases(test) -> list:
    """The cases of a parametrized test that are not slow."""
    (mark,) = [mark for mark in test.pytestmark if mark.name == "parametrize"]
    cases = []
    for case in mark.args[1]:
        if not hasattr(case, "marks"):
            cases.append(case)
        elif "slow" not in {each.name for each in case.marks}:
            cases.append(case.values[0])
    return cases


def killed_by_tests(name: str, source: str) -> bool:
    """Whether the script's other fast tests fail in a copy of the repository."""
    with tempfile.TemporaryDirectory() as directory:
        copied = Path(directory, "repository")
        ignored = shutil.ignore_patterns(".*", "runs", "site", "figures")
        shutil.copytree(ROOT, copied, ignore=ignored)
        (copied / f"{name}.py").write_text(source)
        paths = [
            path.relative_to(ROOT)
            for path in sorted((ROOT / "tests").glob("test_*.py"))
            if path.stem == "test_normalization"
            or (path.stem in (f"test_{name}", "test_sac_td3") and name in path.read_text())
        ]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-k", name, *paths]
        environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PYTHONPATH")}
        environment["JAX_ENABLE_COMPILATION_CACHE"] = "true"  # most programs are not the mutant's
        return (
            subprocess.run(command, cwd=copied, env=environment, capture_output=True).returncode
            == 1
        )


def part_of(text: str) -> tuple[int, int]:
    """The lines of the banners of the mathematics and of acting: between them are the mutants."""
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines, 1) if line.startswith("# --- mathematics"))
    last = next(i for i, line in enumerate(lines, 1) if line.startswith("# --- acting"))
    return first, last


def version_of(name: str, text: str) -> str:
    """A hash of what mutants and twin depend on."""
    first, last = part_of(text)
    parts = text.splitlines()[first:last]
    for path in (f"tests/test_{name}_twin.py", "tests/support/twin.py"):
        parts.append((ROOT / path).read_text())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def run_script(name: str, count: int, seed: int) -> None:
    text = (ROOT / f"{name}.py").read_text()
    script = importlib.import_module(name)
    tests = importlib.import_module(f"test_{name}_twin")
    version = version_of(name, text)
    tree = ast.parse(text)
    mutants = mutants_of(text)
    random.Random(seed).shuffle(mutants)
    checks = Checks(script, tests)
    originals = {case: lowered(script, config) for case, config in checks.configs.items()}

    path = RESULTS / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_text().splitlines() if path.exists() else []
    known = [record for record in map(json.loads, lines) if record["version"] == version]
    results = {(record["place"], record["what"]): record for record in known}
    counted = 0
    for mutant in mutants:
        if counted == count:
            break
        record = results.get((mutant.place, mutant.what))
        if record is None:
            record = {"version": version, "place": mutant.place, "what": mutant.what}
            record |= {"line": mutant.line, "text": text.splitlines()[mutant.line - 1].strip()}
            source = mutant.source(tree)
            record["result"] = result_of(name, source, originals, checks)
            with path.open("a") as file:
                file.write(json.dumps(record) + "\n")
        if record["result"] != "not counted":
            counted += 1
            print(f"{name} {counted}/{count} line {record['line']}: {record['what']}: ", end="")
            print(record["result"], f"    {record['text']}", flush=True)


def result_of(name: str, source: str, originals: dict, checks: Checks) -> str:
    try:
        script = load(source, name)
        programs = {
            case: lowered(script, same_config(script, config))
            for case, config in checks.configs.items()
        }
    except Exception:  # of any kind: what cannot be traced is no silent mistake
        return "not counted"
    if programs == originals:
        return "not counted"
    try:
        checks.run(script)
    except AssertionError:
        return "killed by the twin"
    except Exception as error:
        return f"killed by an error ({type(error).__name__})"
    return "killed by other tests" if killed_by_tests(name, source) else "SURVIVED"


def report() -> int:
    """Print the survivors and the share of the killed. Returns the exit code."""
    killed = 0
    total = 0
    for path in sorted(RESULTS.glob("*.jsonl")):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        records = [r for r in records if r["version"] == records[-1]["version"]]
        counted = [r for r in records if r["result"] != "not counted"]
        survivors = [r for r in counted if r["result"] == "SURVIVED"]
        print(f"{path.stem}: {len(counted) - len(survivors)} of {len(counted)} killed")
        for record in survivors:
            print(f"    line {record['line']}: {record['what']}: {record['text']}")
        killed += len(counted) - len(survivors)
        total += len(counted)
    print(f"all: {killed} of {total} killed")
    return int(killed < 0.95 * total)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scripts", nargs="*")
    parser.add_argument("--count", type=int, default=40, help="mutants that count, per script")
    parser.add_argument("--seed", type=int, default=0, help="of the order in which they are drawn")
    parser.add_argument("--report", action="store_true", help="run nothing, print the results")
    options = parser.parse_args()
    if not options.report:
        for name in options.scripts:
            run_script(name, options.count, options.seed)
    return report()


if __name__ == "__main__":
    raise SystemExit(main())
