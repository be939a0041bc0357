"""benchmarks/plan: programs read and counted against counts by hand, and a training compiled."""

import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest
from support.files import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from plan import program
from plan import training as plan

import ppo
import sac
from onejit.engine import memory

# As XLA prints programs, shortened: `train` runs a step of an environment and an inner loop three
# times, each kernel once. What a kernel moves stands beside it, operands first.
PROGRAM = """HloModule jit_train, is_scheduled=true

FileNames
1 "/scripts/a.py"
2 "/packages/env.py"

FunctionNames
1 "make_train.<locals>.train"
2 "Env.step"
3 "loss"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=4 end_column=9}
2 {file_name_id=2 function_name_id=2 line=20 end_line=20 column=4 end_column=9}
3 {file_name_id=1 function_name_id=3 line=9 end_line=9 column=4 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=2}

%read_row (buffer: f32[10,8], i: s32[]) -> f32[8] {
  %buffer = f32[10,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %row = f32[1,8]{1,0} dynamic-slice(%buffer, %i, %zero), dynamic_slice_sizes={1,8}
  %flat = f32[8]{0} bitcast(%row)
  ROOT %tanh = f32[8]{0} tanh(%flat)
}

%write_row (buffer: f32[10,8], i: s32[], x: f32[8]) -> (f32[10,8], f32[8]) {
  %buffer.1 = f32[10,8]{1,0} parameter(0)
  %i.1 = s32[] parameter(1)
  %x = f32[8]{0} parameter(2)
  %zero.1 = s32[] constant(0)
  %row.1 = f32[1,8]{1,0} bitcast(%x)
  %new = f32[10,8]{1,0} dynamic-update-slice(%buffer.1, %row.1, %i.1, %zero.1)
  %negative = f32[8]{0} negate(%x)
  ROOT %both = (f32[10,8]{1,0}, f32[8]{0}) tuple(%new, %negative)
}

%inner_body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]{0}) parameter(0)
  %j = s32[] get-tuple-element(%p), index=0
  %y = f32[8]{0} get-tuple-element(%p), index=1
  %grad = f32[8]{0} multiply(%y, %y), metadata={op_name="jit(train)/while/body/transpose(jvp(loss))/mul" stack_frame_id=3}
  ROOT %out = (s32[], f32[8]{0}) tuple(%j, %grad)
}

%inner_condition (q: (s32[], f32[8])) -> pred[] {
  %q = (s32[], f32[8]{0}) parameter(0)
  ROOT %true = pred[] constant(true)
}

%short (s: f32[8]) -> f32[8] {
  %s = f32[8]{0} parameter(0)
  ROOT %copy.1 = f32[8]{0} copy(%s)
}

%long (l: f32[8]) -> f32[8] {
  %l = f32[8]{0} parameter(0)
  %copy.2 = f32[8]{0} copy(%l)
  ROOT %copy.3 = f32[8]{0} copy(%copy.2)
}

%body (carry: (s32[], f32[10,8], f32[8], /*index=3*/f32[8])) -> (s32[], f32[10,8], f32[8], /*index=3*/f32[8]) {
  %carry = (s32[], f32[10,8]{1,0}, f32[8]{0}, /*index=3*/f32[8]{0}) parameter(0)
  %n = s32[] get-tuple-element(%carry), index=0
  %rows = f32[10,8]{1,0} get-tuple-element(%carry), index=1
  %read = f32[8]{0} fusion(%rows, %n), kind=kLoop, calls=%read_row, metadata={op_name="jit(train)/while/body/tanh" stack_frame_id=2}
  %written = (f32[10,8]{1,0}, f32[8]{0}) fusion(%rows, %n, %read), kind=kLoop, calls=%write_row
  %rows.1 = f32[10,8]{1,0} get-tuple-element(%written), index=0
  %start = (s32[], f32[8]{0}) tuple(%n, %read)
  %loop = (s32[], f32[8]{0}) while(%start), condition=%inner_condition, body=%inner_body, metadata={op_name="jit(train)/while/body/while" stack_frame_id=3}, backend_config={"known_trip_count":{"n":"5"}}
  %z = f32[8]{0} get-tuple-element(%loop), index=1
  %any = f32[8]{0} conditional(%n, %z, %z), branch_computations={%short, %long}
  %called = f32[8]{0} call(%any), to_apply=%short
  ROOT %next = (s32[], f32[10,8]{1,0}, f32[8]{0}, /*index=3*/f32[8]{0}) tuple(%n, %rows.1, %called, /*index=3*/%called)
}

%condition (c: (s32[], f32[10,8], f32[8], f32[8])) -> pred[] {
  %c = (s32[], f32[10,8]{1,0}, f32[8]{0}, f32[8]{0}) parameter(0)
  ROOT %more = pred[] constant(true)
}

ENTRY %main (key: u32[2], w: bf16[8,8]) -> f32[8] {
  %key = u32[2]{0} parameter(0)
  %w = bf16[8,8]{1,0} parameter(1)
  %product = (bf16[8,8]{1,0}, s8[4194304]{0}) custom-call(%w, %w), custom_call_target="__cublas$gemm"
  %one = bf16[8,8]{1,0} get-tuple-element(%product), index=0
  %copied = (bf16[8,8]{1,0}, bf16[8,8]{1,0}, u32[]) copy-start(%one)
  %done = bf16[8,8]{1,0} copy-done(%copied)
  %initial = (s32[], f32[10,8]{1,0}, f32[8]{0}, f32[8]{0}) tuple(%key, %done, %done, %done)
  %while = (s32[], f32[10,8]{1,0}, f32[8]{0}, f32[8]{0}) while(%initial), condition=%condition, body=%body, metadata={op_name="jit(train)/while" stack_frame_id=1}, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %result = f32[8]{0} get-tuple-element(%while), index=2
}
"""  # noqa: E501


@pytest.fixture(scope="module")
def loops():
    return program.find_loops(program.read_program(PROGRAM)).all()


def test_loops_and_kernels_against_a_count_by_hand(loops):
    numbers = [(loop.trips, loop.runs, loop.depth) for loop in loops]
    assert numbers == [(1, 1, 0), (3, 3, 1), (5, 15, 2)]
    own = [[kernel.name for kernel, _ in loop.kernels] for loop in loops]
    assert own == [
        ["product", "copied"],
        ["read", "written", "copy.2", "copy.3", "copy.1"],
        ["grad"],
    ]
    assert [loop.total() for loop in loops] == [2 + 3 * (5 + 5 * 1), 5 + 5 * 1, 1]
    assert [loop.notes for loop in loops] == [set(), {"conditional"}, set()]


def test_bytes_against_a_count_by_hand(loops):
    moved = {kernel.name: size for loop in loops for kernel, size in loop.kernels}
    matrix, row, index = 8 * 8 * 2, 8 * 4, 4
    assert moved["product"] == 2 * matrix  # its operand is read once; the workspace is no result
    assert moved["read"] == row + index + row  # of ten rows one
    # in place: the others stay; and a second result
    assert moved["written"] == index + row + row + row
    assert moved["grad"] == 2 * row and moved["copy.1"] == 2 * row
    inside = moved["read"] + moved["written"] + 3 * 2 * row + 5 * moved["grad"]
    assert loops[0].total(lambda _, size: size) == moved["product"] + moved["copied"] + 3 * inside


def test_loop_without_a_known_trip_count_counts_once():
    text = PROGRAM.replace('"known_trip_count":{"n":"5"}', "")
    loops = program.find_loops(program.read_program(text)).all()
    assert loops[0].total() == 2 + 3 * (5 + 1) and loops[2].notes == {"trip count not known"}


def test_steps_are_found_by_what_stands_in_their_loops(loops):
    step, kernels = program.step_loop(loops, program.is_of_environment)
    assert step is loops[1] and kernels == 5  # the gradient's loop inside is none of its own
    step, kernels = program.step_loop(loops, program.is_of_gradient)
    assert step is loops[2] and kernels == 1
    assert program.step_loop(loops, lambda each: False) is None


def loop_that_runs(runs: int) -> program.Loop:
    return program.Loop(None, trips=1, runs=runs, depth=0, kernels=[], inner=[], notes=set())


def test_environment_steps_that_a_loop_takes_at_a_time():
    """Of three updates: a loop with a trip for each step, one unrolled by 16, and one update."""
    config = ppo.Config(total_timesteps=3 * 4 * 128, num_envs=4, num_steps=128)
    for trips, steps in ((128, 1), (8, 16), (1, 128)):
        assert plan.environment_steps_at_a_time(config, loop_that_runs(3 * trips)) == steps
    config = sac.Config(total_timesteps=1000 + 3 * 8, learning_starts=1000, num_envs=4, num_steps=2)
    assert plan.environment_steps_at_a_time(config, loop_that_runs(3)) == 2


def test_places(loops):
    assert loops[1].at.frames == [("/scripts/a.py", 7, "make_train.<locals>.train")]
    read = loops[1].kernels[0][0]
    assert read.frames == [("/packages/env.py", 20, "Env.step"), *loops[1].at.frames]


def test_shapes():
    shapes = {
        "f32[]": 4,
        "pred[3]{0}": 3,
        "(bf16[2,3]{1,0}, (u64[5], token[]))": 52,
        "c64[2]": 16,
        "f8e4m3fn[4]": 4,
    }
    assert {shape: program.shape_bytes(shape) for shape in shapes} == shapes


def has_wheels() -> bool:
    return any(map(importlib.util.find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin")))


@pytest.mark.slow
@pytest.mark.skipif(not has_wheels(), reason="needs the CUDA wheels of JAX")
@pytest.mark.parametrize("script", ["q_learning_gridworld", "ppo"])
def test_a_training_compiled(tmp_path, script):
    steps = 3 * (1000 if script == "q_learning_gridworld" else 512) + 5  # 3 updates
    command = [sys.executable, str(ROOT / "benchmarks" / "plan"), script, "--num-seeds=8"]
    command += [f"--total-timesteps={steps}"]
    command += ["--gpu=rtx4090", "--memory=1", "--kernels", f"--json={tmp_path / 'plan.json'}"]
    command += ["--no-most-seeds"] if script == "ppo" else []
    clean = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=clean)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "plan.json").read_text())
    whole, *loops = found["loops"]
    assert whole["kernels"] == sum(len(loop["own"]) * loop["runs"] for loop in found["loops"])
    listed = re.findall(r"(?m)^ +[\d.]+ MB  ", done.stdout)
    assert len(listed) == sum(len(loop["own"]) for loop in found["loops"])
    assert f"{whole['kernels']:,} in the whole training" in done.stdout
    # of rounding
    assert max(whole["kernels"] * 2e-6, whole["bytes"] / 1.008e12) <= whole["seconds"] * (1 + 1e-9)
    update = next(loop for loop in loops if loop["loop"].startswith("train ("))
    assert update["trips"] == update["runs"] == 3 and not any(loop["notes"] for loop in loops)
    step = found["steps"]["environment"]
    num_steps, at_a_time = {"q_learning_gridworld": (1000, 10), "ppo": (128, 16)}[script]
    assert (step["runs"], step["at_a_time"]) == (3 * num_steps // at_a_time, at_a_time)
    assert 4 < step["kernels"] / at_a_time < 60
    if script == "ppo":
        assert step["loop"].startswith("collect > unrolled_scan (ppo.py:")
        gradient = found["steps"]["gradient"]
        assert (gradient["runs"], gradient["at_a_time"]) == (3 * 4 * 4, 1)
    assert found["memory"]["limit"] == memory.GIB and (script == "ppo" or found["most_seeds"] > 100)
