"""Run the quickstart on three seeds and draw its learning curve.

    .venv/bin/python tests/benchmarks/quickstart_curve.py

Writes docs/images/quickstart.png and docs/images/quickstart.json (the numbers, the machine, the versions) and prints
one line for each seed. Numbers in README come from it.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path


ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "quickstart" / "dro" / "config.yaml"
REWARD = "rewards/reasoning_gym_solved/mean"


def run(seed: int, overrides: list[str]) -> dict:
    """Train once in a process of its own; returns the curve of training and the held-out score before and after."""
    with tempfile.TemporaryDirectory() as output_dir:
        command = [sys.executable, "-m", "trl_dro.train", "--config", str(RECIPE), "--output_dir", output_dir]
        begin = time.time()
        subprocess.run(
            [*command, "--seed", str(seed), *overrides],
            check=True,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        seconds = time.time() - begin
        history = json.loads((Path(output_dir) / "trainer_state.json").read_text())["log_history"]
    held_out = [log[f"eval_{REWARD}"] for log in history if f"eval_{REWARD}" in log]
    trained = [log for log in history if REWARD in log]
    return {
        "seed": seed,
        "seconds": round(seconds),
        "training_seconds": round(next(log["train_runtime"] for log in history if "train_runtime" in log)),
        "held_out_before": held_out[0],
        "held_out_after": held_out[-1],
        "steps": [log["step"] for log in trained],
        "solved": [log[REWARD] for log in trained],
        "kl": [log["dro/kl_k2"] for log in trained],
    }


def draw(runs: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for result, color in zip(runs, ("#2a6fbb", "#d1495b", "#3a9d6a", "#8a6fb0"), strict=False):
        axes.plot(result["steps"], result["solved"], color=color, label=f"seed {result['seed']}")
        last = result["steps"][-1]
        for step, score in ((0, result["held_out_before"]), (last, result["held_out_after"])):
            axes.plot(step, score, "o", color=color, markersize=6)
    axes.plot([], [], "o", color="gray", label="held-out words")
    axes.set(xlabel="optimizer step", ylabel="words spelled backward", ylim=(0, 1.02))
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1, 2])
    parser.add_argument("--output_dir", type=Path, default=ROOT / "docs" / "images")
    arguments, overrides = parser.parse_known_args()
    runs = []
    for seed in arguments.seeds:
        runs.append(run(seed, overrides))
        print(
            f"seed {seed}: held-out {runs[-1]['held_out_before']:.2f} -> {runs[-1]['held_out_after']:.2f}, "
            f"{runs[-1]['training_seconds']} s of training, {runs[-1]['seconds']} s in all",
            flush=True,
        )
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    packages = ("torch", "transformers", "trl", "trl-dro")
    report = {
        "command": "python tests/benchmarks/quickstart_curve.py",
        "machine": f"{platform.machine()}, {os.cpu_count()} CPU cores, no GPU",
        "versions": {name: version(name) for name in packages},
        "runs": runs,
    }
    (arguments.output_dir / "quickstart.json").write_text(json.dumps(report, indent=1) + "\n")
    draw(runs, arguments.output_dir / "quickstart.png")


if __name__ == "__main__":
    main()
