"""Training on completions of a real vLLM engine, in this process, on a CPU. `make test-vllm` sets it up and runs it.

vLLM stays out of the project's environment: its CPU build is one person's, and it pins other versions. The file is
its own child script, because a process holds one engine: `python -m tests.test_vllm SETTING REPORT.json`.
"""

import json
import math
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent
STEPS = 40
SETTINGS: dict[str, dict] = {
    "old, with TRL's correction": {},
    "old, with token weights and rejection": {"rollout_correction_preset": "decoupled_k3_rs_token_tis"},
    "old, with normalised sequence weights": {"rollout_is": "sequence", "rollout_is_batch_normalize": True},
    "sampling": {"anchor_policy": "sampling"},
}
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    # what vLLM's launcher expects of a single process
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
}


def keep_weights_that_can_be_synced() -> None:
    """On a CPU vLLM packs a layer's weight and drops it, after which new weights have nowhere to go."""
    import torch
    from vllm.model_executor.layers import utils

    def plain(layer, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain


def share_of_vowels(completions: list[str], **_: object) -> list[float]:
    return [sum(completion.count(vowel) for vowel in "aeiou") / 8 for completion in completions]


def main(setting: str, report: str) -> None:
    import tempfile

    import torch

    from trl_dro import DROConfig, DROTrainer

    from .tiny import FAST, prompts, tiny_model, tiny_tokenizer

    keep_weights_that_can_be_synced()
    with tempfile.TemporaryDirectory() as directory:
        # vLLM's attention on a CPU wants heads of at least 32.
        model = tiny_model(hidden_size=64, head_dim=64, num_attention_heads=1, max_position_embeddings=128)
        model.save_pretrained(f"{directory}/model")
        tiny_tokenizer().save_pretrained(f"{directory}/model")
        settings = {**FAST, "per_device_train_batch_size": 32, "num_generations": 8, "max_steps": STEPS}
        config = DROConfig(
            output_dir=f"{directory}/run",
            dro_beta=0.5,
            learning_rate=3e-3,
            lr_scheduler_type="constant",
            model_init_kwargs={"dtype": "float32"},
            use_vllm=True,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=0.1,
            vllm_max_model_length=64,
            **{**settings, **SETTINGS[setting]},
        )
        trainer = DROTrainer(
            model=f"{directory}/model",
            reward_funcs=share_of_vowels,
            args=config,
            train_dataset=prompts(),
            processing_class=tiny_tokenizer(),
        )
        scored: list[int] = []
        score = trainer._get_per_token_logps_and_entropies

        def counting(*args, **kwargs):
            scored.append(1)
            return score(*args, **kwargs)

        trainer._get_per_token_logps_and_entropies = counting  # type: ignore[method-assign]
        trainer.train()
        finite = all(bool(torch.isfinite(parameter).all()) for parameter in trainer.model.parameters())
        results = {"logs": trainer.state.log_history, "finite": finite, "scored": len(scored)}
        Path(report).write_text(json.dumps(results))


def run(setting: str, directory: Path) -> dict:
    report = directory / "report.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.test_vllm", setting, str(report)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=600,
        check=False,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(report.read_text())


@pytest.mark.vllm
@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM, see `make test-vllm`")
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_policy_learns_from_completions_of_vllm(setting, tmp_path):
    results = run(setting, tmp_path)
    logs = [log for log in results["logs"] if "loss" in log]
    assert len(logs) == STEPS
    assert results["finite"]
    assert all(math.isfinite(value) for log in logs for value in log.values() if isinstance(value, float))
    # two steps on each generated batch, so that half of the windows are at their anchor
    generated = [log for log in logs if "reward" in log]
    assert len(generated) == STEPS // 2
    first, last = generated[:4], generated[-4:]
    assert sum(log["reward"] for log in last) / 4 > sum(log["reward"] for log in first) / 4 + 0.3
    if setting == "sampling":
        assert results["scored"] == STEPS  # one pass for each loss, none for old log-probs
        mismatch = [log["dro/log_ratio_abs"] for log in generated]
    else:
        assert results["scored"] > STEPS
        mismatch = [log["rollout_corr/log_ppl_abs_diff"] for log in generated]
        assert all(abs(log["rollout_corr/kl"]) < 1e-2 for log in generated)
    # The engine follows the weights: its log-probs are the trainer's up to rounding, to the last generation.
    assert all(0 < value < 1e-2 for value in mismatch)
    print(f"\nvLLM, {setting}: reward {first[0]['reward']:.2f} -> {last[-1]['reward']:.2f}")
    # At the start of a generated batch the policy is its own anchor: the distance shows in the other windows.
    for name in sorted(set().union(*logs)):
        if name.startswith(("rollout_corr/", "sampling/", "dro/log_ratio", "dro/kl")):
            values = [log[name] for log in logs if name in log]
            mean = sum(values) / len(values)
            print(f"  {name}: first {values[0]:.3g}, mean {mean:.3g}, last {values[-1]:.3g}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
