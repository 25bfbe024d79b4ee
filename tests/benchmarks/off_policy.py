"""What stale rollouts do to the quickstart task, and where adaptive dro_beta lands.

    .venv/bin/python tests/benchmarks/off_policy.py staleness
    .venv/bin/python tests/benchmarks/off_policy.py adaptive_beta

Prints a table in Markdown and writes docs/images/off_policy_NAME.json (the numbers, the machine, the versions).
Numbers in docs/off_policy.md come from it. Further options go to the training command.
"""

import argparse
import json
import statistics
from pathlib import Path

from learning_curve import ROOT, about, run


RECIPE = "quickstart/dro/config.yaml"
REWARD = "reasoning_gym_solved"
GENERATIONS = 100
# Eight steps on each generated batch, so that the penalty has something to hold back.
ADAPTED = [
    "--num_iterations",
    "8",
    "--max_steps",
    "1600",
    "--learning_rate",
    "1e-3",
    "--lr_scheduler_type",
    "constant",
]


def staleness(options: list[str]) -> list[dict]:
    """The same number of generated batches, with more and more optimizer steps on each of them."""
    rows = []
    for beta in (0.05, 0.5, 5.0):
        for passes in (2, 8, 16):
            steps = ["--num_iterations", str(passes), "--max_steps", str(GENERATIONS * passes)]
            row = measured(["--dro_beta", str(beta), *steps, *options], dro_beta=beta, num_iterations=passes)
            rows.append(row)
            print(row, flush=True)
    return rows


def adaptive_beta(options: list[str]) -> list[dict]:
    """From a dro_beta that is far too small and one that is far too large, to one distance."""
    rows = []
    for beta in (0.05, 20.0):
        for seed in (42, 1):
            target = ["--dro_beta", str(beta), "--dro_target_kl", "0.02"]
            row = measured([*target, *ADAPTED, *options], dro_beta=beta, seed=seed)
            rows.append(row)
            print(row, flush=True)
    return rows


def measured(options: list[str], **label: float) -> dict:
    result = run(RECIPE, int(label.get("seed", 42)), REWARD, options)
    logs = result.pop("history")
    late = [log for log in logs if "dro/kl_k2" in log][-4:]  # the last 100 steps
    row = {
        **label,
        "held_out_before": result["held_out_before"],
        "held_out_after": result["held_out_after"],
    }
    for name in ("dro/kl_k2", "dro/past_optimum", "dro/penalty_share", "entropy", "dro/beta"):
        values = [log[name] for log in late if name in log]
        if values:
            row[name] = statistics.mean(values)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    experiments = {"staleness": staleness, "adaptive_beta": adaptive_beta}
    parser.add_argument("name", choices=experiments)
    arguments, options = parser.parse_known_args()
    rows = experiments[arguments.name](options)
    names = list(dict.fromkeys(name for row in rows for name in row))
    print("| " + " | ".join(names) + " |\n|" + "---|" * len(names))
    for row in rows:
        print("| " + " | ".join(f"{row.get(name, ''):.3g}" if name in row else "" for name in names) + " |")
    report = {**about(f"python tests/benchmarks/off_policy.py {arguments.name}"), "runs": rows}
    path = Path(ROOT / "docs" / "images" / f"off_policy_{arguments.name}.json")
    path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
