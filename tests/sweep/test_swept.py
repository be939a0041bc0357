"""Values of swept fields, as `onejit.sweep.swept` reads and draws them."""

import numpy as np
import pytest

from onejit import sweep
from onejit.script.load import load_script
from onejit.sweep import swept
from onejit.sweep.swept import make_trials


@pytest.mark.parametrize(
    "kind, low, high, expected",
    [
        ("uniform", 2.0, 4.0, [2.0, 3.0, 4.0]),
        ("log-uniform", 0.01, 1.0, [0.01, 0.1, 1.0]),
        ("one-minus-log-uniform", 0.9, 0.999, [0.999, 0.99, 0.9]),
    ],
)
def test_distributions(kind, low, high, expected):
    drawn = swept.from_uniform(kind, low, high, np.array([0.0, 0.5, 1.0]))
    np.testing.assert_allclose(drawn, expected, rtol=1e-12)


@pytest.mark.parametrize(
    "words, holds",
    [
        ("uniform -1 2", True),
        ("uniform 2 2", False),
        ("log-uniform 1e-9 2", True),
        ("log-uniform 0 2", False),
        ("one-minus-log-uniform -1 0.9", True),
        ("one-minus-log-uniform 0.9 1", False),
        ("uniform 1", False),
    ],
)
def test_bounds(words, holds):
    script = load_script("ppo")
    if holds:
        kind, low, high = words.split()
        found = swept.read_distribution(script, "lr", words.split())
        assert found == (kind, float(low), float(high))
    else:
        with pytest.raises(ValueError, match=r"^lr: "):
            swept.read_distribution(script, "lr", words.split())


def test_all_combinations_of_what_is_listed_with_what_is_drawn():
    script = load_script("ppo")
    words = {
        "gamma": ["log-uniform", "1e-4", "1"],
        "lr": ["0.1", "0.2"],
        "ent_coef": ["uniform", "0", "1"],
    }
    trials = make_trials(script, words, 500, 0)
    assert trials == make_trials(script, words, 500, 0) != make_trials(script, words, 500, 1)
    assert [list(trial) for trial in trials] == [list(words)] * 1000
    assert [trial["lr"] for trial in trials] == [0.1] * 500 + [0.2] * 500
    gammas, coefs = (np.array([trial[name] for trial in trials]) for name in ("gamma", "ent_coef"))
    np.testing.assert_array_equal(gammas[:500], gammas[500:])
    assert abs(np.log10(gammas).mean() + 2.0) < 0.2
    assert abs(np.corrcoef(gammas[:500], coefs[:500])[0, 1]) < 0.2  # drawn by themselves


def test_sizes_of_layers():
    script = load_script("ppo")
    assert make_trials(script, {"hidden_sizes": ["8,8", "16"]}, 0, 0) == [
        {"hidden_sizes": (8, 8)},
        {"hidden_sizes": (16,)},
    ]
    assert swept.is_swept(script, "hidden_sizes", ["8,8", "16"])
    assert not swept.is_swept(script, "hidden_sizes", ["8", "16"])  # one value
    request = sweep.read_sweep(["ppo", "--hidden-sizes", "8", "16", "--lr", "0.1", "0.2"], None)
    assert request.search.config.hidden_sizes == (8, 16) and list(request.search.swept) == ["lr"]


def test_parameters_of_environments():
    trials = make_trials(load_script("ppo"), {"env_params": ["rows,7", "rows,8,columns,4"]}, 0, 0)
    assert [dict(each["env_params"]) for each in trials] == [{"rows": 7}, {"rows": 8, "columns": 4}]
