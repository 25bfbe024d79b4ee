"""The Slurm jobs, run here: two "machines" on the loopback address, with stand-ins for Slurm's commands."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from shutil import which

import psutil
import pytest

from trl_dro import checkpoints

from .cpu_engines import what_is_missing
from .forks import ROOT


SCRIPTS = sorted((ROOT / "recipes" / "slurm").glob("*.slurm"))

# Runs the command once for each machine of the step, and passes SIGTERM on to each, as Slurm's `--signal` does.
SRUN = """
import os, signal, subprocess, sys
arguments = sys.argv[1:]
options = dict(a.lstrip("-").partition("=")[::2] for a in arguments if a.startswith("--") and "=" in a)
command = arguments[next(i for i, a in enumerate(arguments) if not a.startswith("--")):]
count = int(options.get("nodes", os.environ["SLURM_JOB_NUM_NODES"]))
with open(os.environ["CALLS"], "a") as calls:
    print("srun", *arguments, file=calls)
tasks = [subprocess.Popen(command, env={**os.environ, "SLURM_NODEID": str(node)}) for node in range(count)]
for number in (signal.SIGTERM,):
    signal.signal(number, lambda number, frame: [task.send_signal(number) for task in tasks])
sys.exit(max(task.wait() % 256 for task in tasks))
"""
SCONTROL = """
import os, sys
with open(os.environ["CALLS"], "a") as calls:
    print("scontrol", *sys.argv[1:], file=calls)
if sys.argv[1] == "show":
    print(*(["127.0.0.1"] * int(os.environ["SLURM_JOB_NUM_NODES"])), sep="\\n")
"""
# A trainer waits for its server, as ours does; the server goes on until it is ended.
NOTING = """
import json, os, sys, time
while "serve" not in sys.argv and '"serve"' not in open(os.environ["CALLS"]).read():
    time.sleep(0.1)
with open(os.environ["CALLS"], "a") as calls:
    call = [os.path.basename(sys.argv[0]), *sys.argv[1:], os.environ.get("VLLM_SERVER_DEV_MODE")]
    print(json.dumps(call), file=calls)
if "serve" in sys.argv:
    time.sleep(60)
"""
# A trainer that takes a while, and then does as ours does on SIGTERM.
STOPPING = """
import os, signal, sys, time
def stop(*_):
    time.sleep(1)
    with open(os.environ["CALLS"], "a") as calls:
        print("saved", file=calls, flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
with open(os.environ["CALLS"], "a") as calls:
    print("training", file=calls, flush=True)
time.sleep(60)
"""


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A directory of commands that comes first in the path, and the file that notes their calls."""
    commands = tmp_path / "bin"
    commands.mkdir()

    def install(name: str, code: str) -> None:
        path = commands / name
        path.write_text(f"#!{sys.executable}\n{code}")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    install("srun", SRUN)
    install("scontrol", SCONTROL)
    install("trl-dro", "import sys\nfrom trl_dro.cli import main\nsys.exit(main())")
    for name, value in {
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_ID": str(os.getpid()),
        "PROCESSES_PER_NODE": "1",
    }.items():
        monkeypatch.setenv(name, value)
    return install, tmp_path / "calls"


def submit(script: str, *options: str) -> subprocess.Popen:
    command = ["bash", str(ROOT / "recipes" / "slurm" / script), *options]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def finished(job: subprocess.Popen, timeout: float = 240) -> str:
    try:
        return job.communicate(timeout=timeout)[0]
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_the_jobs_are_sound_shell(path):
    checker = which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert checker is not None
    done = subprocess.run([checker, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def quickstart(output_dir: Path, steps: int) -> list[str]:
    """The quickstart in small, on the CPU."""
    settings = {
        "output_dir": output_dir,
        "max_steps": steps,
        "save_strategy": "steps",
        "save_steps": 2,
        "save_total_limit": 2,
        "tiny_warmup_steps": 2,
        "task_eval_size": 4,
        "show_completions": 0,
        "eval_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": "true",
    }
    options = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    return ["--config", str(ROOT / "recipes" / "quickstart" / "dro" / "config.yaml"), *options]


# What the marker of a checkpoint says of each engine.
ENGINES = {"cpu_ddp": "replicated", "cpu_fsdp2": "FSDP2", "cpu_zero3": "ZeRO-3"}


@pytest.mark.parametrize(
    "engine", ["cpu_ddp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("cpu_fsdp2", "cpu_zero3"))]
)
def test_two_machines_train_stop_queue_again_and_go_on(cluster, tmp_path, monkeypatch, engine):
    missing = what_is_missing(engine)
    if missing is not None:
        pytest.skip(missing)
    _, calls = cluster
    monkeypatch.setenv("ACCELERATE_CONFIG", engine)
    if engine == "cpu_fsdp2":  # for every Python process of the job
        site = tmp_path / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text("import tests.cpu_engines as e\ne.keep_fsdp_on_cpu()\n")
        monkeypatch.setenv("PYTHONPATH", f"{site}{os.pathsep}{ROOT}")
    run = tmp_path / "run"
    job = submit("fsdp2.slurm", *quickstart(run, 100_000))
    deadline = time.monotonic() + 200
    while checkpoints.newest_complete(run)[0] is None and job.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    # Slurm signals the tasks of the step, not the batch script
    for task in psutil.Process(job.pid).children():
        task.terminate()
    said = finished(job)
    assert job.returncode == 128 + signal.SIGTERM, said
    assert "Stopped by SIGTERM after" in said
    assert f"scontrol requeue {os.environ['SLURM_JOB_ID']}" in calls.read_text()
    newest, torn = checkpoints.newest_complete(run)
    assert torn == {}
    setup = checkpoints.read_marker(newest)["setup"]
    assert (setup["processes"], setup["engine"]) == (2, ENGINES[engine])
    steps = int(newest.rpartition("-")[2])

    job = submit("fsdp2.slurm", *quickstart(run, steps + 2))
    said = finished(job)
    assert job.returncode == 0, said
    assert f"step {steps + 1}/{steps + 2} " in said
    assert f"step {steps}/" not in said
    assert (run / "model.safetensors").exists()


def test_the_server_has_a_machine_of_its_own_and_what_trl_needs(cluster, monkeypatch):
    install, calls = cluster
    install("vllm", NOTING)
    install("trl-dro", NOTING)
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "3")
    monkeypatch.setenv("PROCESSES_PER_NODE", "8")
    job = submit("zero3_vllm_server.slurm", "--config", "X.yaml")
    said = finished(job)
    assert job.returncode != 0
    assert "MODEL: the model of the configuration" in said

    monkeypatch.setenv("MODEL", "Qwen/Qwen3-8B")
    job = submit("zero3_vllm_server.slurm", "--config", "X.yaml", "--dro_beta", "1.0")
    said = finished(job)
    assert job.returncode == 0, said
    noted = [json.loads(line) for line in calls.read_text().splitlines() if line.startswith("[")]
    (server,) = [call for call in noted if call[0] == "vllm"]
    trainers = [call for call in noted if call[0] == "trl-dro"]
    assert server[1:3] == ["serve", "Qwen/Qwen3-8B"]
    assert server[-1] == "1"  # development mode
    assert "--tensor-parallel-size 8" in " ".join(server[:-1])
    assert '--weight-transfer-config {"backend": "nccl"}' in " ".join(server[:-1])
    assert sorted(call[call.index("--machine_rank") + 1] for call in trainers) == ["0", "1"]
    for call in trainers:
        text = " ".join(call[:-1])
        assert "--accelerate_config multi_node_zero3 --num_machines 2 --num_processes 16" in text
        port = server[server.index("--port") + 1]
        assert f"--use_vllm true --vllm_mode server --vllm_server_base_url http://127.0.0.1:{port}" in text
        assert text.endswith("--resume_from_checkpoint auto --config X.yaml --dro_beta 1.0")
        assert call[-1] is None


def test_a_job_with_a_server_saves_before_the_server_ends_and_queues_again(cluster, monkeypatch):
    install, calls = cluster
    install("vllm", NOTING)
    install("trl-dro", STOPPING)
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "3")
    monkeypatch.setenv("MODEL", "Qwen/Qwen3-8B")
    job = submit("zero3_vllm_server.slurm", "--config", "X.yaml")
    deadline = time.monotonic() + 30
    while calls.exists() is False or calls.read_text().count("training\n") < 2:
        assert job.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    job.terminate()  # to the batch script alone, as `--signal=B:` says
    said = finished(job, timeout=30)
    assert job.returncode == 143, said
    lines = calls.read_text().splitlines()
    requeued = lines.index(f"scontrol requeue {os.environ['SLURM_JOB_ID']}")
    assert lines[:requeued].count("saved") == 2
