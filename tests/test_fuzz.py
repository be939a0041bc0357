"""Random bad command lines and YAML files: never a traceback, always exit code 2 and one line that names the field.

500 of them in `make test-all`, few in `make test`. Two kinds: what is bad by construction has to be refused; what is
random may be refused or taken, but nothing else may happen. No training begins: whatever gets as far as the run
directory has been taken.
"""

import contextlib
import dataclasses
import importlib
import io
import json
import string
from collections.abc import Mapping

import pytest
import yaml
from conftest import SCRIPTS, flags, small_config
from hypothesis import given, settings
from hypothesis import strategies as st

EXAMPLES = pytest.mark.parametrize("examples", [20, pytest.param(250, marks=pytest.mark.slow)])
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12)
WORDS = st.text(string.ascii_letters + "-_./[]{}:, '\"\n\t#&*!|>%@`\u00e9\u2028\u4e2d", min_size=1, max_size=12)


class Taken(Exception):
    """The input was taken, training would begin."""


def take(*_):
    raise Taken


def run(script, args) -> str | None:
    """What `main` says where it refuses, None where it takes the input. Anything else that it does is raised."""
    original, said = script.open_run_dir, io.StringIO()
    script.open_run_dir = take
    try:
        with contextlib.redirect_stderr(said):
            script.main([*flags(small_config(script)), "--num-seeds=2", *args])
    except Taken:
        return None
    except SystemExit as stop:
        assert stop.code == 2, f"exit code {stop.code}"
        return said.getvalue()
    finally:
        script.open_run_dir = original
    raise AssertionError("it has run")


def assert_one_line(said: str, *names: str) -> None:
    assert said.endswith("\n") and len(said.splitlines()) == 1, said
    assert ": error: " in said and "Traceback" not in said, said
    for name in names:
        assert name.replace("_", "-") in said.replace("_", "-"), f"{name} is not in: {said}"


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def bad_values(kind) -> st.SearchStrategy:
    """Values that a field of this type cannot have, as YAML would give them."""
    words = WORDS.filter(lambda text: not is_number(text))
    not_whole = st.floats(-1e6, 1e6).filter(lambda value: not value.is_integer())
    negative = st.integers(-(10**15), -1)
    mappings = st.dictionaries(st.text(string.ascii_letters, min_size=1), st.integers(), min_size=1, max_size=2)
    lists = st.lists(st.integers(1, 9), min_size=2, max_size=3)
    if kind is int:
        return st.one_of(words, not_whole, negative, mappings, lists, st.booleans(), st.none())
    if kind is float:
        infinite = st.sampled_from([float("nan"), float("inf"), float("-inf"), 1e300])
        return st.one_of(words, infinite, mappings, lists, st.booleans(), st.none())
    if kind is bool:
        return st.one_of(words.filter(lambda text: text.strip().lower() not in ("true", "false")), negative, lists)
    if kind is str:
        return st.one_of(words.map(lambda text: f"no{text}"), negative, mappings)
    if kind is Mapping:
        unknown = mappings.map(lambda mapping: {f"no_{name}": value for name, value in mapping.items()})
        return st.one_of(unknown, negative, lists, st.booleans())
    return st.one_of(words, negative, mappings, not_whole, st.lists(negative, min_size=1, max_size=3))


@st.composite
def bad_settings(draw, script):
    """`(name, value)`, of which one is wrong; the name is to be in the message."""
    field = draw(st.sampled_from(dataclasses.fields(script.Config)))
    if draw(st.integers(0, 4)) == 0:
        ending = draw(st.text(string.ascii_letters + "_-.", min_size=1, max_size=5))
        if "".join([field.name, ending]).replace("-", "_") not in vars(script.Config()):
            return field.name + ending, 1
    return field.name, draw(bad_values(field.type))


def as_flag(name: str, value) -> str:
    return f"--{name}={json.dumps(value) if isinstance(value, dict) else value}"


@EXAMPLES
def test_what_is_bad_by_construction(examples, tmp_path):
    file = tmp_path / "bad.yaml"

    @settings(max_examples=examples, deadline=None, database=None, derandomize=True)
    @given(st.data())
    def check(data):
        script = importlib.import_module(data.draw(st.sampled_from(SCRIPTS), label="script"))
        name, value = data.draw(bad_settings(script), label="setting")
        by_flag = data.draw(st.booleans(), label="by flag")
        if not by_flag:
            file.write_text(yaml.safe_dump({name: value}, allow_unicode=True), encoding="utf-8")
        said = run(script, [as_flag(name, value)] if by_flag else [f"--config={file}"])
        assert said is not None, "it was taken"
        assert_one_line(said, name)

    check()


def random_values() -> st.SearchStrategy:
    scalars = st.one_of(st.none(), st.booleans(), st.integers(-3, 10**7), st.floats(), TEXT, st.dates())
    return st.recursive(
        scalars,
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
        max_leaves=5,
    )


@EXAMPLES
def test_what_is_random(examples, tmp_path):
    file = tmp_path / "bad.yaml"

    @settings(max_examples=examples, deadline=None, database=None, derandomize=True)
    @given(st.data())
    def check(data):
        script = importlib.import_module(data.draw(st.sampled_from(SCRIPTS), label="script"))
        names = [field.name for cls in (script.Config, script.Options) for field in dataclasses.fields(cls)]
        name = st.sampled_from([name for name in names if name not in ("config", "run_dir", "resume")])
        pairs = data.draw(st.dictionaries(st.one_of(name, name, TEXT), random_values(), max_size=3), label="settings")
        form = data.draw(st.sampled_from(["flags", "words", "yaml", "text"]), label="form")
        if form == "flags":
            args = [as_flag(*pair) for pair in pairs.items()]
        elif form == "words":
            args = [word for pair in pairs.items() for word in (f"--{pair[0]}", str(pair[1]))]
        else:
            text = yaml.safe_dump(pairs, allow_unicode=True) if form == "yaml" else data.draw(TEXT, label="text")
            file.write_bytes(text.encode("utf-8"))
            args = [f"--config={file}"]
        said = run(script, args)
        if said is not None:
            assert_one_line(said)
            given = [*pairs, *names] if form in ("flags", "words") else ["bad.yaml", *names]
            normal = " ".join(said.split()).replace("_", "-")
            assert any(" ".join(each.split()).replace("_", "-") in normal for each in given), said

    check()
