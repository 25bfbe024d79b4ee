"""Run a recipe on several seeds and draw its learning curves.

    .venv/bin/python tests/benchmarks/learning_curve.py quickstart
    .venv/bin/python tests/benchmarks/learning_curve.py smollm2     # after `make demo`, which gets the model

Writes docs/images/NAME.png and docs/images/NAME.json (the numbers, the machine, the versions) and prints one line for
each run. Numbers in README come from it. Further options go to the training command.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path


ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Benchmark:
    """What is run and what its picture says."""

    recipes: dict[str, str]
    """Recipe by the label of its curves."""
    seeds: tuple[int, ...]
    reward: str
    label: str
    held_out: str
    options: tuple[str, ...] = ()


BENCHMARKS = {
    "quickstart": Benchmark(
        recipes={"": "quickstart/dro/config.yaml"},
        seeds=(42, 1, 2),
        reward="reasoning_gym_solved",
        label="words spelled backward",
        held_out="held-out words",
    ),
    "smollm2": Benchmark(
        recipes={"LoRA": "SmolLM2-135M/dro/config_lora.yaml", "full": "SmolLM2-135M/dro/config_full.yaml"},
        seeds=(42, 1),
        reward="reasoning_gym_final_number",
        label="problems solved",
        held_out="held-out problems",
        options=("--model_name_or_path", str(ROOT / "runs" / "SmolLM2-135M-Instruct")),
    ),
}


def run(recipe: str, seed: int, reward: str, options: list[str]) -> dict:
    """Train once in a process of its own; returns the curve of training and the held-out score before and after."""
    with tempfile.TemporaryDirectory() as output_dir:
        path = str(ROOT / "recipes" / recipe)
        command = [sys.executable, "-m", "trl_dro.train", "--config", path, "--output_dir", output_dir]
        begin = time.time()
        subprocess.run(
            [*command, "--seed", str(seed), *options],
            check=True,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        seconds = time.time() - begin
        history = json.loads((Path(output_dir) / "trainer_state.json").read_text())["log_history"]
    metric = f"rewards/{reward}/mean"
    held_out = [log[f"eval_{metric}"] for log in history if f"eval_{metric}" in log]
    trained = [log for log in history if metric in log]
    return {
        "seed": seed,
        "seconds": round(seconds),
        "training_seconds": round(next(log["train_runtime"] for log in history if "train_runtime" in log)),
        "held_out_before": held_out[0],
        "held_out_after": held_out[-1],
        "steps": [log["step"] for log in trained],
        "solved": [log[metric] for log in trained],
        "kl": [log["dro/kl_k2"] for log in trained],
        "history": trained,
    }


def about(command: str) -> dict:
    """What a report begins with: the command, the machine, the versions."""
    packages = ("torch", "transformers", "trl", "trl-dro")
    return {
        "command": command,
        "machine": f"{platform.machine()}, {os.cpu_count()} CPU cores, no GPU",
        "versions": {name: version(name) for name in packages},
    }


def draw(benchmark: Benchmark, runs: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for result, color in zip(runs, ("#2a6fbb", "#d1495b", "#3a9d6a", "#8a6fb0"), strict=False):
        label = f"{result['variant']}, seed {result['seed']}".removeprefix(", ")
        axes.plot(result["steps"], result["solved"], color=color, label=label)
        last = result["steps"][-1]
        for step, score in ((0, result["held_out_before"]), (last, result["held_out_after"])):
            axes.plot(step, score, "o", color=color, markersize=6)
    axes.plot([], [], "o", color="gray", label=benchmark.held_out)
    axes.set(xlabel="optimizer step", ylabel=benchmark.label, ylim=(0, 1.02))
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="best")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=BENCHMARKS)
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--output_dir", type=Path, default=ROOT / "docs" / "images")
    arguments, options = parser.parse_known_args()
    benchmark = BENCHMARKS[arguments.name]
    report = {**about(f"python tests/benchmarks/learning_curve.py {arguments.name}"), "runs": []}
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    for variant, recipe in benchmark.recipes.items():
        for seed in arguments.seeds or benchmark.seeds:
            result = {"variant": variant, **run(recipe, seed, benchmark.reward, [*benchmark.options, *options])}
            result.pop("history")
            report["runs"].append(result)
            print(
                f"{variant} seed {seed}: held-out {result['held_out_before']:.2f} -> {result['held_out_after']:.2f}, "
                f"{result['training_seconds']} s of training, {result['seconds']} s in all".lstrip(),
                flush=True,
            )
            (arguments.output_dir / f"{arguments.name}.json").write_text(json.dumps(report, indent=1) + "\n")
            draw(benchmark, report["runs"], arguments.output_dir / f"{arguments.name}.png")


if __name__ == "__main__":
    main()
