"""Measure on one GPU: speed next to the peers, plans against measurements, and rows at scale.

    git clone https://github.com/luchris429/purejaxrl
    git clone https://github.com/mttga/purejaxql
    pip install --target deps --no-deps flashbax rejax
    PYTHONPATH=deps python benchmarks/gpu.py --purejaxrl purejaxrl --purejaxql purejaxql --out gpu
    python benchmarks/gpu.py speed/ppo rows/reppo    # the measurements that begin like this
    python benchmarks/gpu.py --list                  # all measurements, their time and packages
    python benchmarks/gpu.py speed/ppo --plan h100   # kernels of both sides, without a GPU
    python benchmarks/gpu.py checks --small          # a trial on a CPU

The lanes run in this order:

- speed: seconds of each script and of its peer's code with 1 to 2048 agents, one training that is
  not counted and three that are;
- headline: three trainings at their published length, with the compilation included;
- checks: whether a training that was stopped and resumed equals an uninterrupted one, whether
  copies between the host and the GPU change anything, returns here and on a CPU, unrolled loops,
  and physics in full precision and in TF32;
- rows: rows of benchmarks/RESULTS.md that need a GPU. `--keep` copies them to benchmarks/results/.

Each result is written into the folder --out as soon as it is there, and a later call does what is
left, also on another machine that has this folder: compiled programs lie in it too. Nothing starts
that is planned to end after --seconds. A result that failed is tried again by the next call.

Programs of the speed lane are compiled side by side first, because XLA compiles on the CPU. XLA
chooses kernels by timing them, and neighbours disturb that. The headline trainings are therefore
compiled alone: if their steps per second differ by more than 3 % from the speed lane, call again
with --alone and another --out.

Where there is no git, the commit is read from a file commit.txt in the root of the repository.
"""

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

CACHE = ROOT / ".cache" / "gpu"  # of compiled programs, a folder for each lane
ARCHIVE_BYTES = 15 * 2**20  # of one archive of compiled programs
CONTESTANTS = ("script", "peer")

# --- lanes ---

SPEED = {  # row of speed.py: {agents: steps of each}, for trainings of 2 to 4 seconds on an H100
    "ppo": {1: 102_400, 8: 102_400, 64: 102_400, 256: 76_800, 1024: 40_960, 2048: 25_600},
    "ppo_minatar": {1: 983_040, 32: 491_520, 256: 131_072},
    "dqn": {1: 120_000, 64: 120_000, 256: 120_000},  # 10,000 are warm-up
    "pqn_minatar": {1: 655_360, 10: 655_360, 64: 262_144},
    "sac": {1: 6000, 50: 6000, 200: 6000},
    "td3": {1: 6000, 50: 6000, 200: 6000},
    "ppo_continuous": {1: 409_600, 64: 204_800, 256: 81_920},
    "ppo_rnn": {1: 10_240, 64: 10_240, 256: 10_240},
}
LARGE = {("ppo", 1024), ("ppo", 2048), ("ppo_minatar", 256), ("ppo_continuous", 256)}
HEADLINE = {  # steps of each agent, and seconds on an H100
    ("ppo", 256): (500_000, 60),
    ("ppo", 2048): (500_000, 120),
    ("ppo_minatar", 256): (10_000_000, 330),
}
CHECKS = {
    "resume": 60,
    "copies": 60,
    "returns/ppo/cartpole": 60,
    "returns/ppo_continuous/pendulum": 60,
    "returns/ppo/breakout": 100,
    "unrolled/ppo/rolled": 40,
    "unrolled/ppo/steps": 60,
    "unrolled/ppo/both": 100,
    "unrolled/ppo_minatar/rolled": 40,
    "unrolled/ppo_minatar/steps": 60,
    "unrolled/ppo_minatar/both": 100,
    "precision/full": 60,
    "precision/TF32": 60,
}
PLAYGROUND = "playground"
ROWS = {  # row of returns.py: seeds, seconds on an H100, packages
    "reppo/playground_cheetah_run": (5, 450, PLAYGROUND),
    "ppo_continuous/playground_cheetah_run": (5, 450, PLAYGROUND),
    "reppo/playground_walker_run": (5, 500, PLAYGROUND),
    "ppo_continuous/playground_walker_run": (5, 500, PLAYGROUND),
    "ppo/breakout@1e7": (64, 120, ""),
    "ppo/asterix@1e7": (64, 120, ""),
    "ppo/freeway@1e7": (64, 120, ""),
    "ppo/spaceinvaders@1e7": (64, 120, ""),
    "ppo/seaquest@1e7": (64, 240, ""),
    "pqn/breakout": (64, 200, ""),
    "pqn/asterix": (64, 200, ""),
    "pqn/freeway": (64, 240, ""),
    "pqn/spaceinvaders": (64, 220, ""),
    "pqn/seaquest": (64, 360, ""),
    "ppo_continuous/ant": (8, 480, "brax"),
    "ppo_continuous/halfcheetah": (8, 500, "brax"),
    "ppo_continuous/hopper_positional": (8, 300, "brax"),
    "ppo_continuous/walker2d": (8, 300, "brax"),
    "ppo_continuous/humanoid": (8, 500, "brax"),
    "ppo/craftax_symbolic": (8, 200, "craftax"),
    "ppo/craftax_symbolic@1e8": (1, 500, "craftax"),
    "reppo/playground_cartpole_swingup": (5, 450, PLAYGROUND),
    "reppo/playground_hopper_hop": (5, 450, PLAYGROUND),
    "reppo/playground_finger_spin": (5, 450, PLAYGROUND),
    "reppo/playground_acrobot_swingup": (5, 450, PLAYGROUND),
    "dqn/breakout@5e6": (16, 120, ""),
    "dqn/asterix@5e6": (16, 120, ""),
    "dqn/freeway@5e6": (16, 120, ""),
    "dqn/spaceinvaders@5e6": (16, 120, ""),
    "dqn/seaquest@5e6": (16, 160, ""),
    "rainbow/breakout@5e6": (16, 300, ""),
    "rainbow/asterix@5e6": (16, 300, ""),
    "rainbow/freeway@5e6": (16, 400, ""),
    "rainbow/spaceinvaders@5e6": (16, 300, ""),
    "rainbow/seaquest@5e6": (16, 400, ""),
    "sac/hopper": (8, 300, "brax"),
    "td3/hopper": (8, 300, "brax"),
    "crossq/hopper": (8, 300, "brax"),
    "crossq/pendulum": (16, 60, ""),
    "crossq/mountaincar_continuous": (16, 120, ""),
    "crossq/reacher": (16, 120, ""),
    "flashsac/mujoco_halfcheetah_gpu@1e5": (6, 500, "envpool"),
    "flashsac/mujoco_walker2d_gpu@1e5": (6, 500, "envpool"),
    "flashsac/mujoco_ant_gpu@1e5": (6, 500, "envpool"),
    "flashsac/mujoco_humanoid_gpu@1e5": (6, 500, "envpool"),
    "flashsac/mujoco_halfcheetah@1e5": (6, 240, "envpool"),
    "flashsac/mujoco_walker2d@1e5": (6, 240, "envpool"),
    "flashsac/pendulum": (16, 90, ""),
    "flashsac/reacher": (16, 180, ""),
    "flashsac/mountaincar_continuous": (16, 120, ""),
    "flashsac/playground_cheetah_run": (1, 500, PLAYGROUND),
}


class Packages(NamedTuple):
    modules: str  # that are imported
    wheels: str
    megabytes: float


PACKAGES = {
    "": Packages(
        "distrax gymnax tyro optax flax safetensors", "distrax gymnax tfp-nightly tyro", 8
    ),
    "peers": Packages("flashbax rejax", "flashbax rejax", 0.1),
    "brax": Packages("brax.envs", "brax mujoco mujoco-core mujoco-mjx", 17),
    "craftax": Packages("craftax.craftax_env", "craftax", 0.4),
    "gymnasium": Packages("gymnasium", "gymnasium", 1),
    "envpool": Packages("envpool gymnasium", "envpool, its assets and gymnasium", 297),
    "playground": Packages("mujoco_playground", "playground and the packages of brax", 25),
}
NEEDS = {
    "dqn/peer": "peers",
    "sac/peer": "peers",
    "td3/peer": "peers",
    "ppo_continuous/script": "brax",
    "ppo_continuous/peer": "brax",
}
NEEDS_OF_CHECKS = {"copies": "gymnasium", "precision/full": "brax", "precision/TF32": "brax"}


class Job(NamedTuple):
    """A measurement. Its key is LANE/NAME, and in the lanes speed and headline
    LANE/ROW/AGENTS/CONTESTANT."""

    key: str
    seconds: float  # that it is planned to take
    packages: str = ""

    @property
    def lane(self) -> str:
        return self.key.partition("/")[0]

    @property
    def name(self) -> str:
        return self.key.partition("/")[2]


def contestants(lane: str, row: str, agents: int, seconds: float) -> list[Job]:
    jobs = []
    for contestant in CONTESTANTS:
        key = f"{lane}/{row}/{agents}/{contestant}"
        jobs.append(Job(key, seconds, NEEDS.get(f"{row}/{contestant}", "")))
    return jobs


def check(name: str, seconds: float) -> Job:
    return Job(f"checks/{name}", seconds, NEEDS_OF_CHECKS.get(name, ""))


def all_jobs() -> list[Job]:
    jobs = []
    for row, cells in SPEED.items():
        for agents in cells:
            jobs += contestants("speed", row, agents, 25)
    for (row, agents), (_, seconds) in HEADLINE.items():
        jobs += contestants("headline", row, agents, seconds)
    jobs += [check(name, seconds) for name, seconds in CHECKS.items()]
    for name, (_, seconds, packages) in ROWS.items():
        jobs.append(Job(f"rows/{name}", seconds, packages))
    return jobs


def small_jobs() -> list[Job]:
    """A trial of each lane, with two agents and two updates."""
    jobs = []
    for row in SPEED:
        jobs += contestants("speed", row, 2, 20)
    jobs += contestants("headline", "ppo", 2, 20)
    for name in ("resume", "copies", "returns/ppo/catch", "unrolled/ppo/both", "precision/TF32"):
        jobs.append(check(name, 30))
    return [*jobs, Job("rows/ppo/catch", 40)]


# --- results: a line of results.jsonl for each key, the last one counts ---


def read(out: Path) -> dict:
    file = out / "results.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return {key: result for key, result in map(json.loads, lines)}


def keep(out: Path, key: str, result: dict) -> None:
    if not result:
        print(f"{key}: left out, the peer is not there", flush=True)
        return
    with (out / "results.jsonl").open("a") as file:
        file.write(json.dumps([key, result]) + "\n")
    print(key, {name: value for name, value in result.items() if name != "row"}, flush=True)


def forget_failures(out: Path) -> None:
    """Of earlier calls, so that they are tried again."""
    kept = {key: result for key, result in read(out).items() if "failed" not in result}
    lines = [json.dumps([key, result]) + "\n" for key, result in kept.items()]
    (out / "results.jsonl").write_text("".join(lines))


# --- the compiled programs of the lane speed, in archives that travel with the results ---


def unpack(out: Path) -> None:
    programs = CACHE / "speed"
    programs.mkdir(parents=True, exist_ok=True)
    for file in sorted(out.glob("programs_*.tar")):
        with tarfile.open(file) as archive:
            archive.extractall(programs, filter="data")


def pack(out: Path) -> None:
    for file in out.glob("programs_*.tar"):
        file.unlink()
    archives = [[]]
    size = 0
    for program in sorted((CACHE / "speed").iterdir()):
        size += program.stat().st_size
        if size > ARCHIVE_BYTES and archives[-1]:
            archives.append([])
            size = program.stat().st_size
        archives[-1].append(program)
    for number, programs in enumerate(archives):
        with tarfile.open(out / f"programs_{number}.tar", "w") as archive:
            for program in programs:
                archive.add(program, program.name)


# --- measurements, in processes of their own: this one never starts JAX ---


def set_environment(job: Job, options) -> None:
    """Of the processes that are started next."""
    os.environ["JAX_NUM_CPU_DEVICES"] = "1"  # as many as a GPU has
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(CACHE / job.lane)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    # XLA's own caches would make the folder's name a part of each program's key.
    os.environ["JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"] = "none"
    # A program for a GPU that is not there cannot be read back.
    without_cache = job.lane == "headline" or options.plan
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false" if without_cache else "true"
    # Only trainings that are timed take the memory as users do. Others share it with processes.
    timed = job.lane in ("speed", "headline")
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "true" if timed else "false"
    if options.plan:
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
        os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0"


def program_of(job: Job, options):
    """`(train, keys, steps)` of a contestant. `train` is None if the peer is not there."""
    import jax
    from speed import ROWS as SPEED_ROWS

    _, row, agents, contestant = job.key.split("/")
    agents = int(agents)
    if options.small:
        steps = 2 * SPEED_ROWS[row].divisor
        steps += {"dqn": 10_000, "sac": 256, "td3": 256}.get(row, 0)  # the warm-up
    elif job.lane == "headline":
        steps, _ = HEADLINE[row, agents]
    else:
        steps = SPEED[row][agents]
    trainings = dict(zip(CONTESTANTS, SPEED_ROWS[row].make(options, steps), strict=True))
    keys = jax.random.split(jax.random.PRNGKey(0), agents)
    return trainings[contestant], keys, steps


def compile_job(job: Job, options) -> dict:
    """Compile a contestant, which fills the cache, and plan it. {} if the peer is not there."""
    import jax
    from jax.experimental import topologies
    from plan.training import read_gpu
    from speed import compile_for

    try:
        train, keys, _ = program_of(job, options)
        if train is None:
            return {}
        if options.plan:
            gpu = read_gpu(options.plan)
            topology = topologies.get_topology_desc(
                platform="cuda", target_config=gpu.description, topology="1x1x1"
            )
            on_gpu = jax.sharding.SingleDeviceSharding(topology.devices[0])
            keys = jax.ShapeDtypeStruct(keys.shape, keys.dtype, sharding=on_gpu)
        compiled, seconds = compile_for(train, keys)
        return {"compilation": seconds} | plan_of(compiled, options.plan)
    except Exception as error:
        return failure(error)


def failure(error: Exception) -> dict:
    return {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}


def plan_of(compiled, gpu: str = "") -> dict:
    """Kernels and bytes of a compiled program, and its seconds as a plan has them."""
    import jax
    from plan import program, training

    from onejit.engine import memory

    gpu = gpu or planned_gpu(jax.devices()[0].device_kind)
    loops = program.find_loops(program.read_program(compiled.as_text()))
    result = {"kernels": loops.total(), "memory": memory.program_bytes(compiled)}
    if gpu:
        bandwidth = training.read_gpu(gpu).bandwidth
        launch = training.Options.launch_us / 1e6
        result["planned"] = loops.total(lambda kernel, size: max(launch, size / bandwidth))
    return result


def planned_gpu(device_kind: str) -> str:
    """The file of benchmarks/plan/gpus for this GPU, or "" if there is none."""
    for part, name in {"H100": "h100", "A100": "a100", "4090": "rtx4090"}.items():
        if part in device_kind:
            return name
    return ""


def compile_side_by_side(jobs: list[Job], options) -> None:
    """The large programs last and two at a time: XLA allocates their buffers."""
    set_environment(jobs[0], options)
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    spawn = multiprocessing.get_context("spawn")
    many = 1 if options.alone else min(8, os.cpu_count())
    last = options.deadline - 60  # what is being compiled then ends in time
    for is_large, processes in ((False, many), (True, min(2, many))):
        of_size = [job for job in jobs if is_large == (job_size(job) in LARGE)]
        with ProcessPoolExecutor(processes, mp_context=spawn) as pool:
            running = {pool.submit(compile_job, job, options): job for job in of_size}
            try:
                for done in as_completed(running, max(0, last - time.time())):
                    keep(options.out, compiled_key(running[done], options), done.result())
            except (BrokenProcessPool, TimeoutError):  # the rest compiles when it is timed
                pool.shutdown(wait=False, cancel_futures=True)


def compiled_key(job: Job, options) -> str:
    return f"{'planned' if options.plan else 'compiled'}/{job.name}"


def job_size(job: Job) -> tuple[str, int]:
    _, row, agents, _ = job.key.split("/")
    return row, int(agents)


def work(jobs: list[Job], options) -> None:
    """The jobs of a process, one after the other."""
    from origin import origin

    for job in jobs:
        if time.time() + job.seconds > options.deadline:
            continue
        try:
            result = MEASURE[job.lane](job, options)
        except Exception as error:  # the other jobs are worth having
            result = failure(error)
        keep(options.out, job.key, result | origin() if result else {})


def run_in_processes(jobs: list[Job], options) -> None:
    """One process for each row or kind of check, and a new one for the rest if it dies."""
    spawn = multiprocessing.get_context("spawn")
    families = {}
    for job in jobs:
        family = job.key if job.lane == "rows" else job.key.split("/")[1]
        families.setdefault(family, []).append(job)
    for family in families.values():
        while family and time.time() + min(job.seconds for job in family) < options.deadline:
            set_environment(family[0], options)
            process = spawn.Process(target=work, args=(family, options))
            process.start()
            process.join()
            if process.exitcode == 0:
                break
            family = [job for job in family if job.key not in read(options.out)]
            if family:
                keep(options.out, family[0].key, {"failed": f"exit code {process.exitcode}"})
                family = family[1:]


def measure_speed(job: Job, options) -> dict:
    """Seconds of a training, and of its compilation. {} if the peer is not there."""
    import jax
    from speed import compile_for

    train, keys, steps = program_of(job, options)
    if train is None:
        return {}
    events = []
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
    compiled, compilation = compile_for(train, keys)
    of_cache = [event for event in events if event.startswith("/jax/compilation_cache/cache_")]
    seconds = []
    for _ in range(1 if job.lane == "headline" else 4):
        begun = time.perf_counter()
        jax.block_until_ready(compiled(keys))
        seconds.append(time.perf_counter() - begun)
    return {
        "agents": len(keys),
        "steps": steps,
        "seconds": seconds[-3:],
        "compilation": compilation,
        "compiled before": of_cache[-1:] == ["/jax/compilation_cache/cache_hits"],
    }


def measure_row(job: Job, options) -> dict:
    import returns

    seeds = 2 if options.small else ROWS[job.name][0]
    return {"row": returns.measure(job.name, seeds, *returns.seeds_of(job.name))}


def measure_check(job: Job, options) -> dict:
    import gpu_checks

    check, _, variant = job.name.partition("/")
    return getattr(gpu_checks, check)(variant, options)


MEASURE = {
    "speed": measure_speed,
    "headline": measure_speed,
    "checks": measure_check,
    "rows": measure_row,
}


def absent_packages(jobs: list[Job]) -> set[str]:
    """Sets of packages that cannot be imported, all tried at once."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}  # gymnax starts JAX
    processes = {}
    for name in {job.packages for job in jobs} | {""}:
        command = [sys.executable, "-c", f"import {PACKAGES[name].modules.replace(' ', ', ')}"]
        processes[name] = subprocess.Popen(
            command, env=environment, stderr=subprocess.PIPE, text=True
        )
    absent = set()
    for name, process in processes.items():
        _, errors = process.communicate()
        if process.returncode:
            absent.add(name)
            print(f"{name or 'all jobs'}: cannot import: {errors.splitlines()[-1]}", flush=True)
    return absent


# --- the command ---


def show_list(jobs: list[Job], results: dict) -> None:
    results = {key: result for key, result in results.items() if "failed" not in result}
    for job in jobs:
        state = "measured" if job.key in results else f"{job.seconds:g} s"
        print(f"{job.key:45} {state:>10}  {job.packages}")
    for lane in MEASURE:
        of_it = [job for job in jobs if job.lane == lane and job.key not in results]
        print(f"{lane}: {sum(job.seconds for job in of_it) / 60:.0f} min are left")
    print("all jobs need", PACKAGES[""].wheels, f"({PACKAGES[''].megabytes} MB of wheels), and:")
    for name in dict.fromkeys(job.packages for job in jobs if job.packages):
        print(f"{name}: {PACKAGES[name].wheels} ({PACKAGES[name].megabytes} MB)")


def keep_rows(results: dict) -> None:
    import returns

    for key, result in results.items():
        if key.startswith("rows/") and "row" in result:
            returns.keep(result["row"])


def run(jobs: list[Job], options) -> None:
    forget_failures(options.out)
    unpack(options.out)
    absent = absent_packages(jobs)
    jobs = [job for job in jobs if not {job.packages, ""} & absent]
    for lane in MEASURE:
        results = read(options.out)
        left = [job for job in jobs if job.lane == lane and job.key not in results]
        to_compile = [job for job in left if compiled_key(job, options) not in results]
        if lane == "speed" and to_compile:
            compile_side_by_side(to_compile, options)
        if not options.plan:
            pack(options.out)
            run_in_processes(left, options)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("keys", nargs="*", metavar="KEY", help="the beginnings of keys")
    for name in ("purejaxrl", "purejaxql"):
        parser.add_argument(f"--{name}", type=Path, help="a clone of the repository")
    parser.add_argument("--list", action="store_true", help="measure nothing")
    parser.add_argument("--keep", action="store_true", help="copy the rows to benchmarks/results/")
    parser.add_argument(
        "--plan", default="", metavar="GPU", help="plan the speed lane for this GPU"
    )
    parser.add_argument("--small", action="store_true", help="a trial, small enough for a CPU")
    parser.add_argument("--alone", action="store_true", help="compile one program at a time")
    parser.add_argument("--seconds", type=float, default=540, help="end before this time")
    parser.add_argument("--out", type=Path, default=Path("gpu"), help="folder for the results")
    options = parser.parse_args()
    for name in ("purejaxrl", "purejaxql"):
        path = getattr(options, name)
        if path and not path.exists():
            parser.error(f"--{name} {path}: is not there")
    jobs = small_jobs() if options.small else all_jobs()
    jobs = [job for job in jobs if job.key.startswith(tuple(options.keys or [""]))]
    if options.plan:
        jobs = [job for job in jobs if job.lane == "speed"]
    if not jobs:
        parser.error(f"no key begins with {' or '.join(options.keys)}; see --list")
    options.deadline = time.time() + options.seconds
    options.out = options.out.absolute()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.list:
        show_list(jobs, read(options.out))
    elif options.keep:
        keep_rows(read(options.out))
    else:
        run(jobs, options)
        import gpu_table

        gpu_table.write(read(options.out), options.out)


if __name__ == "__main__":
    main()
