"""What only a GPU shows: bfloat16, flash attention, the launch files of GPUs, vLLM beside the trainer, resuming.

`bash tests/gpu/run.sh` runs these. TRL_DRO_GPU_TESTS=cpu lets them run without a GPU, to see that they work.
"""

import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM, TrainerCallback

from trl_dro import DROConfig, DROTrainer
from trl_dro.resuming import SIGTERM_EXIT_CODE

from ..test_trainer import largest_difference, length_reward, make_trainer, scripted_rollout, weights
from ..tiny import prompts, tiny_model, tiny_tokenizer


ROOT = Path(__file__).parent.parent.parent
ON_CPU = os.environ.get("TRL_DRO_GPU_TESTS") == "cpu"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() or ON_CPU), reason="needs a GPU, see tests/gpu/run.sh"),
    pytest.mark.filterwarnings("ignore"),
]

# Heads of 64, which flash attention and vLLM take.
SHAPE = {
    "hidden_size": 256,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
}


def config(output_dir: Path, **overrides) -> DROConfig:
    settings = {
        "output_dir": str(output_dir),
        "use_cpu": ON_CPU,
        "bf16": not ON_CPU,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "per_device_train_batch_size": 16,
        "num_generations": 8,
        "num_iterations": 4,
        "max_completion_length": 32,
        "max_steps": 24,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "dro_beta": 0.5,
    }
    return DROConfig(**{**settings, **overrides})


def saved_model(directory: Path) -> str:
    tiny_model(**SHAPE).save_pretrained(directory / "model")
    tiny_tokenizer().save_pretrained(directory / "model")
    return str(directory / "model")


def rewards(trainer: DROTrainer) -> list[float]:
    return [log["reward"] for log in trainer.state.log_history if "reward" in log]


@pytest.mark.parametrize("attention", ["sdpa", "flash_attention_2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_in_bfloat16_learns(tmp_path, attention, dtype):
    if attention == "flash_attention_2" and (find_spec("flash_attn") is None or dtype == "float32"):
        pytest.skip("flash-attn is not installed, or needs bfloat16 weights")
    args = config(tmp_path / "run", model_init_kwargs={"dtype": dtype, "attn_implementation": attention})
    trainer = make_trainer(args, model=saved_model(tmp_path))
    trainer.train()
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
    assert sum(rewards(trainer)[-2:]) > sum(rewards(trainer)[:2])
    penalised = [log["dro/kl_k2"] for log in trainer.state.log_history if "dro/kl_k2" in log]
    assert max(penalised) > 1e-5


def test_the_cut_into_micro_batches_does_not_matter(tmp_path):
    trained = []
    for rows, steps in ((16, 1), (4, 4)):
        args = config(
            tmp_path / "run",
            bf16=False,
            optim="sgd",
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=steps,
            max_steps=5,
            shuffle_dataset=False,
        )
        trainer = make_trainer(args, model=tiny_model(**SHAPE), rollout_func=scripted_rollout)
        trainer.train()
        trained.append(weights(trainer))
    moved = largest_difference(trained[0], dict(tiny_model(**SHAPE).to(trainer.model.device).named_parameters()))
    assert largest_difference(*trained) < 1e-4 * moved


def test_a_resumed_run_goes_on_from_within_a_generated_batch(tmp_path):
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        trained = []
        for resume in (None, str(tmp_path / "run" / "checkpoint-6")):
            args = config(tmp_path / "run", save_strategy="steps", save_steps=6, max_steps=10)
            trainer = make_trainer(args, model=tiny_model(**SHAPE))
            trainer.train(resume_from_checkpoint=resume)
            trained.append((weights(trainer), rewards(trainer)))
    finally:
        torch.use_deterministic_algorithms(False)
    assert trained[0][1] == trained[1][1]
    assert largest_difference(trained[0][0], trained[1][0]) < 1e-5


def test_a_run_that_is_asked_to_stop_saves_and_goes_on(tmp_path):
    class Stop(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 4:
                os.kill(os.getpid(), signal.SIGTERM)

    def trainer(name: str, *callbacks: TrainerCallback) -> DROTrainer:
        args = config(tmp_path / name, save_strategy="steps", save_steps=100, max_steps=8)
        return make_trainer(args, model=tiny_model(**SHAPE), callbacks=list(callbacks))

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        whole = trainer("whole")
        whole.train()
        with pytest.raises(SystemExit) as ended:
            trainer("run", Stop()).train()
        assert ended.value.code == SIGTERM_EXIT_CODE
        resumed = trainer("run")
        resumed.train(resume_from_checkpoint=True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert rewards(whole) == rewards(resumed)
    assert largest_difference(weights(whole), weights(resumed)) < 1e-5


@pytest.mark.parametrize("bits", [None, 4])
def test_an_adapter_is_trained_and_loads_again(tmp_path, bits):
    from peft import AutoPeftModelForCausalLM, LoraConfig
    from transformers import BitsAndBytesConfig

    if bits and find_spec("bitsandbytes") is None:
        pytest.skip("bitsandbytes is not installed")
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16) if bits else None
    trainer = DROTrainer(
        model=saved_model(tmp_path),
        reward_funcs=length_reward,
        args=config(tmp_path / "run", anchor_policy="reference", max_steps=6),
        train_dataset=prompts(),
        processing_class=tiny_tokenizer(),
        peft_config=LoraConfig(r=8, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"]),
        quantization_config=quantization,
    )
    trainer.train()
    trainer.save_model(str(tmp_path / "adapter"))
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    moved = [value.abs().max().item() for name, value in loaded.state_dict().items() if "lora_B" in name]
    assert max(moved) > 0


@pytest.mark.parametrize("name", ["single_gpu", "multi_gpu", "fsdp2", "zero2", "zero3", "zero3_offload"])
def test_a_launch_file_trains_on_one_gpu(tmp_path, name):
    if name.startswith("zero") and find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    launch = ["--accelerate_config", f"cpu_{name}" if ON_CPU else name, "--num_processes", "1"]
    if ON_CPU and name not in ("single_gpu",):
        pytest.skip("tests/test_engines.py launches the files of the CPU")
    options = {
        "output_dir": tmp_path / "run",
        "use_cpu": str(ON_CPU).lower(),
        "bf16": str(not ON_CPU).lower(),
        "max_steps": 4,
        "tiny_warmup_steps": 20,
        "task_eval_size": 0,
        "show_completions": 0,
        "eval_strategy": "no",
        "save_strategy": "steps",
        "save_steps": 3,
    }
    command = [sys.executable, "-m", "trl_dro.cli", "train", "--config", "recipes/quickstart/dro/config.yaml"]
    command += [part for key, value in options.items() for part in (f"--{key}", str(value))]
    done = subprocess.run(
        command if ON_CPU else [*command, *launch], capture_output=True, text=True, cwd=ROOT, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert (tmp_path / "run" / "checkpoint-3" / "trl_dro_complete.json").exists()
    assert Qwen3ForCausalLM.from_pretrained(tmp_path / "run").config.hidden_size > 0


@pytest.mark.parametrize("anchor", [{"anchor_policy": "sampling"}, {"rollout_is": "token"}], ids=str)
def test_vllm_generates_beside_the_trainer(tmp_path, anchor):
    if find_spec("vllm") is None or ON_CPU:
        pytest.skip("vllm is not installed")
    args = config(
        tmp_path / "run",
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.2,
        vllm_max_model_length=64,
        max_steps=12,
        **anchor,
    )
    trainer = make_trainer(args, model=saved_model(tmp_path))
    trainer.train()
    logs = [log for log in trainer.state.log_history if "reward" in log]
    name = "dro/log_ratio_abs" if "anchor_policy" in anchor else "rollout_corr/log_ppl_abs_diff"
    print([round(log[name], 4) for log in logs])
    assert all(0 < log[name] < 0.1 for log in logs)
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
