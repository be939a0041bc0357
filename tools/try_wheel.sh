#!/usr/bin/env bash
# Build the wheel, install it in an empty environment, and train a few updates with it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
constraints="$PWD/constraints.txt"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip wheel --quiet --no-deps --wheel-dir "$folder" .
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet -c "$constraints" "$folder"/onejit-*.whl
cd "$folder"
venv/bin/onejit train ppo --total-timesteps 1e4 --num-seeds 2 --run-dir run
venv/bin/onejit list run
