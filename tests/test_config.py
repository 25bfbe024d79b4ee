"""What `DROConfig` refuses, accepts and translates."""

import dataclasses
import json
import math
import re
import warnings

import pytest
import yaml
from trl import GRPOConfig

from trl_dro import DROConfig
from trl_dro.config_rules import REPLACED
from trl_dro.objectives import DRO, GSPO, PPOClip
from trl_dro.parsing import DROParser


CPU = {"use_cpu": True, "bf16": False, "report_to": "none"}

# Settings on top of dro_beta=0.5, and what the message must hold beside the field: its value, what is allowed, and
# what to write.
BAD = [
    # objective and its parameters
    ({"policy_loss": "drro"}, "policy_loss", ["'drro'", "nearest first: dro,", "ppo_clip"]),
    ({"policy_loss": "PPO"}, "policy_loss", ["'PPO'", "ppo_clip"]),
    ({"policy_loss": None}, "policy_loss", ["None"]),
    (
        {"policy_loss": "bypass_mode", "dro_beta": None},
        "bypass_mode",
        ["anchor_policy", "sampling", "rollout correction"],
    ),
    ({"policy_loss": "vespo", "dro_beta": None}, "vespo", ["gspo"]),
    ({"policy_loss": "bnpo", "dro_beta": None}, "bnpo", ["token-mean"]),
    ({"policy_loss": "no_such_module.Loss", "dro_beta": None}, "no_such_module.Loss", ["import"]),
    ({"policy_loss_kwargs": "beta=0.5"}, "policy_loss_kwargs", ["'beta=0.5'", "dict"]),
    ({"policy_loss_kwargs": [0.5]}, "policy_loss_kwargs", ["[0.5]", "dict"]),
    ({"policy_loss_kwargs": {1: 1}}, "policy_loss_kwargs", ["1 is no name", '{"beta": 0.5}']),
    ({"dro_beta": 10**400}, "dro_beta=1000", ["finite", "dro_beta=0.5"]),
    ({"policy_loss_kwargs": {"betta": 1.0}}, "betta", ["beta", "level"]),
    ({"dro_beta": None, "policy_loss_kwargs": {"betta": 1.0}}, "betta", ["beta", "level"]),
    ({"dro_beta": None, "policy_loss_kwargs": {"beta": None, "level": "token"}}, "dro_beta", ["dro_beta=0.5"]),
    ({"policy_loss_kwargs": {"beta": 1.0}}, "dro_beta", ["twice", "0.5", "1.0"]),
    ({"policy_loss_kwargs": {"level": "token"}, "dro_level": "sequence"}, "dro_level", ["twice"]),
    ({"dro_beta": None}, "dro_beta", ["l* = A / dro_beta", "dro_beta=0.5"]),
    ({"dro_beta": 0}, "dro_beta=0 ", ["> 0", "A / dro_beta", "dro_beta=0.5"]),
    ({"dro_beta": -1.0}, "dro_beta=-1.0", ["> 0", "dro_beta=0.5"]),
    ({"dro_beta": math.nan}, "dro_beta=nan", ["finite", "dro_beta=0.5"]),
    ({"dro_beta": math.inf}, "dro_beta=inf", ["finite", "dro_beta=0.5"]),
    ({"dro_beta": "abc"}, "dro_beta='abc'", ["number > 0", "dro_beta=0.5"]),
    ({"dro_beta": True}, "dro_beta=True", ["number > 0", "dro_beta=0.5"]),
    ({"dro_beta": None, "policy_loss_kwargs": {"beta": 0}}, "beta=0", ["policy_loss_kwargs", "> 0"]),
    ({"dro_level": "tokens"}, "dro_level", ["'tokens'", "'token'", "'sequence'"]),
    ({"policy_loss": "ppo_clip"}, "dro_beta", ["0.5", "policy_loss='dro'", "dro_beta=None"]),
    ({"generation_kwargs": {"do_sample": False}}, "generation_kwargs['do_sample']", ["False", "temperature=1.0"]),
    ({"generation_kwargs": {"max_new_tokens": 3}}, "generation_kwargs['max_new_tokens']", ["max_completion_length"]),
    ({"generation_kwargs": {"num_return_sequences": 4}}, "num_return_sequences", ["4", "num_generations=8"]),
    ({"model_init_kwargs": "{bad"}, "model_init_kwargs", ["'{bad'", "dict"]),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs", ["[1]", "dict"]),
    ({"sync_ref_model": "false"}, "sync_ref_model", ["'false'", "True or False", "sync_ref_model=False"]),
    ({"bf16": "false"}, "bf16", ["'false'", "True or False or None", "bf16=False"]),
    (
        {"gradient_checkpointing": False, "activation_checkpointing": True},
        "gradient_checkpointing",
        ["activation_checkpointing=False"],
    ),
    ({"mask_truncated_completions": "no"}, "mask_truncated_completions", ["'no'", "mask_truncated_completions=False"]),
    ({"policy_loss": "ppo_clip", "dro_beta": None, "dro_level": "sequence"}, "dro_level", ["policy_loss='dro'"]),
    (
        {"policy_loss": "ppo_clip", "dro_beta": None, "policy_loss_kwargs": {"epsilon": 0.2}},
        "epsilon",
        ["epsilon_low", "epsilon_high"],
    ),
    (
        {"policy_loss": "ppo_clip", "dro_beta": None, "policy_loss_kwargs": {"dual_clip": 0.5}},
        "dual_clip",
        ["0.5", "> 1"],
    ),
    (
        {"policy_loss": "cispo", "dro_beta": None, "policy_loss_kwargs": {"epsilon_low": 0.2, "ratio_max": 5.0}},
        "ratio_max",
        ["epsilon"],
    ),
    (
        {"policy_loss": "sapo", "dro_beta": None, "policy_loss_kwargs": {"temperature_pos": 0.0}},
        "temperature_pos",
        ["0.0", "> 0"],
    ),
    # aggregation
    ({"loss_agg_mode": "token_mean"}, "loss_agg_mode", ["'token_mean'", "'token-mean'", "'seq-mean-token-sum'"]),
    ({"loss_scale_factor": 100}, "loss_scale_factor", ["100", "seq-mean-token-sum-norm"]),
    (
        {"loss_scale_factor": 0, "loss_agg_mode": "seq-mean-token-sum-norm"},
        "loss_scale_factor",
        ["0", "> 0", "loss_scale_factor=256"],
    ),
    (
        {"loss_agg_mode": "seq-mean-token-sum-norm", "max_completion_length": None},
        "loss_scale_factor",
        ["None", "max_completion_length", "loss_scale_factor=512"],
    ),
    # anchors
    ({"anchor_policy": "ref"}, "anchor_policy", ["'ref'", "'reference'", "'old'", "'sampling'"]),
    (
        {"anchor_policy": "reference", "policy_loss": "ppo_clip", "dro_beta": None},
        "anchor_policy",
        ["'reference'", "policy_loss='dro'", "anchor_policy='old'"],
    ),
    (
        {"anchor_policy": "sampling", "vllm_importance_sampling_correction": True},
        "vllm_importance_sampling_correction",
        ["True", "twice", "vllm_importance_sampling_correction=False"],
    ),
    # TRL's loss knobs
    ({"loss_type": "grpo"}, "loss_type", ["'grpo'", "'dapo'", "loss_agg_mode='seq-mean-token-mean'"]),
    ({"loss_type": "dr_grpo"}, "loss_type", ["'dr_grpo'", "seq-mean-token-sum-norm"]),
    ({"loss_type": "cispo"}, "loss_type", ["policy_loss='cispo'"]),
    ({"loss_type": "dro"}, "loss_type", ["policy_loss='dro'"]),
    ({"importance_sampling_level": "sequence"}, "importance_sampling_level", ["'sequence'", "gspo"]),
    ({"epsilon": 0.1}, "epsilon", ["0.1", "epsilon_low"]),
    ({"epsilon_high": 0.28}, "epsilon_high", ["0.28", "epsilon_high"]),
    ({"delta": 2.0}, "delta", ["2.0", "dual_clip"]),
    ({"sapo_temperature_pos": 2.0}, "sapo_temperature_pos", ["2.0", "temperature_pos"]),
    ({"sapo_temperature_neg": 2.0}, "sapo_temperature_neg", ["2.0", "temperature_neg"]),
    ({"vespo_k_pos": 1.0}, "vespo_k_pos", ["1.0"]),
    ({"vespo_k_neg": 1.0}, "vespo_k_neg", ["1.0"]),
    ({"vespo_lambda_pos": 1.0}, "vespo_lambda_pos", ["1.0"]),
    ({"vespo_lambda_neg": 1.0}, "vespo_lambda_neg", ["1.0"]),
    # what online RL or this trainer cannot do
    ({"label_smoothing_factor": 0.1}, "label_smoothing_factor", ["0.1", "0.0"]),
    ({"auto_find_batch_size": True}, "auto_find_batch_size", ["True", "per_device_train_batch_size"]),
    ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy", ["'group_by_length'", "'random'"]),
    ({"train_sampling_strategy": "sequential"}, "train_sampling_strategy", ["shuffle_dataset=False"]),
    # batch geometry
    ({"num_generations": 1}, "num_generations", ["1", ">= 2"]),
    ({"num_generations": 3}, "num_generations", ["3", "8 rows", "num_generations=2"]),
    ({"num_generations": 8.0}, "num_generations", ["8.0", "whole number"]),
    ({"per_device_train_batch_size": 0}, "per_device_train_batch_size", ["0", ">= 1"]),
    ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps", ["0", ">= 1"]),
    (
        {"gradient_accumulation_steps": 2, "steps_per_generation": 3},
        "steps_per_generation",
        ["3", "divide", "steps_per_generation=2"],
    ),
    ({"generation_batch_size": 12}, "generation_batch_size", ["12", "8", "generation_batch_size=8"]),
    (
        {"generation_batch_size": 32, "steps_per_generation": 2},
        "generation_batch_size",
        ["32", "16", "generation_batch_size=None"],
    ),
    ({"num_iterations": 0}, "num_iterations", ["0", ">= 1"]),
    ({"num_generations_eval": 0}, "num_generations_eval", ["0", ">= 1"]),
    (
        {"eval_strategy": "steps", "per_device_eval_batch_size": 6},
        "per_device_eval_batch_size",
        ["6", "8", "per_device_eval_batch_size=8"],
    ),
    ({"max_completion_length": 0}, "max_completion_length", ["0", ">= 1"]),
    # sampling and engines
    ({"temperature": 0.0}, "temperature", ["0.0", "> 0", "temperature=1.0"]),
    ({"top_p": 1.5}, "top_p", ["1.5", "(0, 1]"]),
    ({"top_k": -1}, "top_k", ["-1", ">= 0"]),
    ({"min_p": 2.0}, "min_p", ["2.0", "[0, 1]"]),
    ({"repetition_penalty": 0.0}, "repetition_penalty", ["0.0", "> 0"]),
    ({"generation_kwargs": {"temperature": 0.5}, "temperature": 0.7}, "temperature", ["0.5", "0.7"]),
    ({"generation_kwargs": "hot"}, "generation_kwargs", ["'hot'", "dict"]),
    (
        {"use_vllm": True, "use_transformers_continuous_batching": True},
        "use_transformers_continuous_batching",
        ["True", "use_vllm=False"],
    ),
    ({"vllm_mode": "collocate"}, "vllm_mode", ["'collocate'", "'colocate'", "'server'"]),
    ({"vllm_model_impl": "hf"}, "vllm_model_impl", ["'hf'", "'transformers'"]),
    (
        {"vllm_importance_sampling_mode": "token"},
        "vllm_importance_sampling_mode",
        ["'token'", "'token_truncate'", "'sequence_mask'"],
    ),
    (
        {"vllm_importance_sampling_clip_min": 4.0},
        "vllm_importance_sampling_clip_min",
        ["4.0", "3.0", "vllm_importance_sampling_clip_min=None"],
    ),
    (
        {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": None},
        "vllm_importance_sampling_clip_max",
        ["None", "vllm_importance_sampling_clip_max=3.0"],
    ),
    ({"vllm_gpu_memory_utilization": 1.5}, "vllm_gpu_memory_utilization", ["1.5", "(0, 1]"]),
    ({"vllm_tensor_parallel_size": 0}, "vllm_tensor_parallel_size", ["0", ">= 1"]),
    ({"generation_kwargs": {"supress_tokens": [5]}}, "generation_kwargs['supress_tokens']=[5]", ["'suppress_tokens'"]),
    ({"generation_kwargs": {"top_pp": 0.5}}, "generation_kwargs['top_pp']", ["GenerationConfig", "{'top_p': 0.5}"]),
    (
        {"generation_kwargs": {"seed": 1, "top_h": 0.5}},
        "generation_kwargs['seed']=1",
        ["no option", "Write `generation_kwargs={'top_h': 0.5}`"],
    ),
    ({"generation_kwargs": {"seed": 1}}, "generation_kwargs['seed']", ["Write `generation_kwargs=None`"]),
    (
        {"generation_kwargs": {"eos_token_id": [5]}},
        "generation_kwargs['eos_token_id']=[5]",
        ["padding", "model.generation_config.eos_token_id"],
    ),
    ({"generation_kwargs": {"stop_strings": ["a"]}}, "generation_kwargs['stop_strings']=['a']", ["vLLM", "tokens"]),
    ({"generation_kwargs": {"return_dict_in_generate": True}}, "['return_dict_in_generate']=True", ["tokens alone"]),
    ({"generation_kwargs": {"token_healing": True}}, "generation_kwargs['token_healing']=True", ["prompt"]),
    ({"generation_kwargs": {"disable_compile": True}}, "generation_kwargs['disable_compile']=True", ["trainer sets"]),
    ({"max_completion_length": None}, "max_completion_length=None", ["20 tokens", "max_completion_length=256"]),
    ({"cache_implementation": "statik"}, "cache_implementation='statik'", ["cache_implementation='static'"]),
    # rewards, reference, entropy, logging
    ({"reward_weights": []}, "reward_weights", ["[]", "[1.0, 0.5]"]),
    ({"reward_weights": [1.0, math.nan]}, "reward_weights", ["nan", "finite"]),
    ({"reward_weights": 1.0}, "reward_weights", ["1.0", "list"]),
    ({"scale_rewards": "std"}, "scale_rewards", ["'std'", "'none'", "'group'", "'batch'"]),
    ({"multi_objective_aggregation": "sum"}, "multi_objective_aggregation", ["'sum'", "'sum_then_normalize'"]),
    ({"beta": -0.1}, "beta", ["-0.1", ">= 0"]),
    ({"beta": math.nan}, "beta", ["nan", "finite"]),
    ({"sync_ref_model": True}, "sync_ref_model", ["True", "sync_ref_model=False"]),
    ({"ref_model_mixup_alpha": 1.5}, "ref_model_mixup_alpha", ["1.5", "[0, 1]"]),
    ({"ref_model_sync_steps": 0}, "ref_model_sync_steps", ["0", ">= 1"]),
    ({"top_entropy_quantile": 1.2}, "top_entropy_quantile", ["1.2", "[0, 1]"]),
    ({"entropy_coef": -0.1}, "entropy_coef", ["-0.1", ">= 0"]),
    ({"entropy_coef_min": 2.0, "use_adaptive_entropy": True}, "entropy_coef_min", ["2.0", "1.0"]),
    ({"off_policy_mask_threshold": 0.0}, "off_policy_mask_threshold", ["0.0", "> 0"]),
    ({"router_aux_loss_coef": -1.0}, "router_aux_loss_coef", ["-1.0", ">= 0"]),
    ({"learning_rate": math.nan}, "learning_rate", ["nan", "finite"]),
    ({"max_grad_norm": -1.0}, "max_grad_norm", ["-1.0", ">= 0"]),
    ({"log_completions_hub_repo": "me/logs"}, "log_completions_hub_repo", ["'me/logs'", "log_completions=True"]),
    ({"num_completions_to_print": 0, "log_completions": True}, "num_completions_to_print", ["0", ">= 1"]),
    # the training loop
    *[({"max_steps": value}, f"max_steps={value!r}", ["-1 or", ">= 1"]) for value in (0, -5, 1.5, "abc", None)],
    *[({"num_train_epochs": value}, f"num_train_epochs={value!r}", ["> 0"]) for value in (0, -1, math.nan, "two")],
    *[({"seed": value}, f"seed={value!r}", ["0 to 2**32 - 1", "seed=42"]) for value in (-1, 1.5, "abc", 2**32)],
    *[({"data_seed": value}, f"data_seed={value!r}", ["data_seed=None"]) for value in (-1, 1.5, "abc")],
    *[({"pad_to_multiple_of": value}, f"pad_to_multiple_of={value!r}", ["'auto'"]) for value in (0, -4, "abc", 1.5)],
    *[({"weight_decay": value}, f"weight_decay={value!r}", [">= 0"]) for value in (math.nan, -0.1, "abc")],
    *[({"warmup_steps": value}, f"warmup_steps={value!r}", [">= 0"]) for value in (math.nan, -1)],
    *[({"neftune_noise_alpha": value}, f"noise_alpha={value!r}", ["or None"]) for value in (math.nan, -1.0, "abc")],
    *[({name: value}, f"{name}={value!r}", ["[0, 1)"]) for name in ("adam_beta1", "adam_beta2") for value in (1, 2)],
    *[({"adam_epsilon": value}, f"adam_epsilon={value!r}", ["> 0"]) for value in (0, -1e-8, math.nan)],
    ({"dataloader_num_workers": -1}, "dataloader_num_workers=-1", [">= 0"]),
    ({"dataloader_num_workers": 1, "dataloader_prefetch_factor": 0}, "dataloader_prefetch_factor=0", [">= 1"]),
    ({"eval_delay": math.nan}, "eval_delay=nan", [">= 0"]),
    *[
        ({"logging_steps": value}, f"logging_steps={value!r}", ["logging_strategy='no'"])
        for value in (0, -5, math.nan)
    ],
    *[({"save_steps": value}, f"save_steps={value!r}", ["save_strategy='no'"]) for value in (0, -1, "abc")],
    *[
        ({"eval_steps": value, "eval_strategy": "steps"}, f"eval_steps={value!r}", ["None", "eval_strategy='no'"])
        for value in (0, -1)
    ],
    ({"log_level": "inof"}, "log_level='inof'", ["log_level='info'"]),
    ({"report_to": "wandbb"}, "report_to='wandbb'", ["report_to='wandb'"]),
    ({"report_to": ["wandb", "none"]}, "report_to=['wandb', 'none']", ["'tensorboard'"]),
    ({"report_to": None}, "report_to=None", ["report_to='none'"]),
    ({"lr_scheduler_kwargs": {"typo": 1}}, "lr_scheduler_kwargs['typo']=1", ["linear has no", "_kwargs=None"]),
    (
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"minlr": 0.1}},
        "lr_scheduler_kwargs['minlr']=0.1",
        ["{'min_lr': 0.1}"],
    ),
    ({"accelerator_config": {"split_batches": True}}, "accelerator_config['split_batches']=True", ["False"]),
    ({"accelerator_config": {"dispatch_batches": True}}, "accelerator_config['dispatch_batches']=True", ["None"]),
    ({"accelerator_config": {"split_batchs": True}}, "accelerator_config['split_batchs']=True", ["'split_batches'"]),
    (
        {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 4}}},
        "accelerator_config['gradient_accumulation_kwargs']['num_steps']=4",
        ["gradient_accumulation_steps=4"],
    ),
]


@pytest.mark.parametrize(("settings", "field", "said"), BAD, ids=lambda part: str(part)[:70])
def test_a_bad_setting_is_refused_with_field_value_allowed_values_and_the_fix(settings, field, said):
    with pytest.raises(ValueError, match=re.escape(field)) as refused:
        DROConfig(**{**CPU, "dro_beta": 0.5, "num_iterations": 2, **settings})
    for part in said:
        assert part in str(refused.value)
    assert re.search("Write|write|Leave", str(refused.value)), "no word on what to write instead"


def test_tensor_context_and_sequence_parallelism_are_refused():
    from accelerate.parallelism_config import ParallelismConfig

    for name in ("tp_size", "cp_size", "sp_size"):
        with pytest.raises(ValueError, match=f"parallelism_config.{name}=2 is refused"):
            DROConfig(**CPU, dro_beta=0.5, parallelism_config=ParallelismConfig(**{name: 2}))


# Each as it is written in Python; the same on the command line and in YAML.
GOOD = [
    {"dro_beta": 0.5},
    {"dro_beta": 1},
    {"dro_beta": 1e-3, "dro_level": "sequence"},
    {"policy_loss_kwargs": {"beta": 0.5, "level": "sequence"}},
    {"policy_loss": "reinforce"},
    {"policy_loss": "gpg"},
    {"policy_loss": "ppo_clip", "policy_loss_kwargs": {"epsilon_high": 0.28, "dual_clip": None}},
    {"policy_loss": "vanilla", "loss_agg_mode": "seq-mean-token-mean"},
    {"policy_loss": "gspo", "loss_agg_mode": "seq-mean-token-mean", "policy_loss_kwargs": {"epsilon_low": 3e-4}},
    {"policy_loss": "cispo", "policy_loss_kwargs": {"ratio_min": 0.0, "ratio_max": 4.0}},
    {"policy_loss": "sapo", "loss_agg_mode": "seq-mean-token-mean", "policy_loss_kwargs": {"temperature_neg": 1.1}},
    {"policy_loss": "trl_dro.objectives.Reinforce"},
    {"dro_beta": 0.5, "loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 128},
    {"dro_beta": 0.5, "loss_agg_mode": "seq-mean-token-sum-norm"},
    {"dro_beta": 0.5, "loss_agg_mode": "token-sum", "max_grad_norm": 0.0},
    {"dro_beta": 0.5, "anchor_policy": "reference", "sync_ref_model": True, "ref_model_sync_steps": 64},
    {"dro_beta": 0.5, "anchor_policy": "sampling", "use_vllm": True},
    {"dro_beta": 0.5, "reward_weights": [1.0, 0.25]},
    {"dro_beta": 0.5, "max_steps": 1000, "learning_rate": 1e-5},
    {"dro_beta": 0.5, "scale_rewards": "batch", "beta": 0.04, "use_bias_correction_kl": False},
    {"dro_beta": 0.5, "gradient_accumulation_steps": 2, "steps_per_generation": 8},
    {"dro_beta": 0.5, "gradient_accumulation_steps": 8, "steps_per_generation": 2, "num_iterations": 3},
    {"dro_beta": 0.5, "generation_batch_size": 64},
    {"dro_beta": 0.5, "generation_kwargs": {"suppress_tokens": [7]}, "temperature": 0.7},
    {"dro_beta": 0.5, "use_adaptive_entropy": True, "entropy_target": 0.5},
    {"dro_beta": 0.5, "model_init_kwargs": {"dtype": "bfloat16"}, "mask_truncated_completions": True},
    {"dro_beta": 0.5, "use_vllm": True, "vllm_importance_sampling_correction": False},
    {
        "dro_beta": 0.5,
        "use_vllm": True,
        "max_completion_length": None,
        "generation_kwargs": {"stop": ["a"], "seed": 1},
    },
    {"dro_beta": 0.5, "trust_remote_code": True, "generation_kwargs": {"steps": 64}},
    {"dro_beta": 0.5, "generation_kwargs": {"typical_p": 0.5, "do_sample": True, "stop_strings": None}},
    {"dro_beta": 0.5, "logging_strategy": "no", "save_strategy": "epoch", "logging_steps": 0, "save_steps": -1},
    {"dro_beta": 0.5, "logging_steps": 0.5, "eval_strategy": "steps"},
    {"dro_beta": 0.5, "max_steps": -1, "num_train_epochs": 0.3, "seed": 0, "warmup_steps": 0.1},
    {"dro_beta": 0.5, "report_to": ["wandb"], "log_level": "info", "cache_implementation": "static"},
    {"dro_beta": 0.5, "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
]


def as_command_line(settings: dict) -> list[str]:
    arguments = []
    for name, value in settings.items():
        if isinstance(value, dict):
            arguments += [f"--{name}", json.dumps(value)]
        elif isinstance(value, list):
            arguments += [f"--{name}", *map(str, value)]
        else:
            arguments += [f"--{name}", str(value)]
    return arguments


@pytest.mark.parametrize("settings", GOOD, ids=lambda settings: str(settings)[:70])
def test_a_good_setting_is_the_same_from_python_yaml_and_the_command_line(settings, tmp_path):
    written = {**CPU, "num_iterations": 2, "output_dir": str(tmp_path), **settings}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(written))
    from_python = DROConfig(**written)
    (from_yaml,) = DROParser((DROConfig,)).parse_args_and_config(["--config", str(tmp_path / "config.yaml")])
    (from_shell,) = DROParser((DROConfig,)).parse_args_and_config(as_command_line(written))
    assert from_yaml.to_dict() == from_python.to_dict()
    assert from_shell.to_dict() == from_python.to_dict()
    for name, value in settings.items():
        assert getattr(from_python, name) == value


def test_the_tables_are_as_long_as_they_should_be():
    assert len(BAD) >= 60
    assert len(GOOD) >= 20


# One bad setting of each kind that Python, the file and the command line spell alike.
WRITTEN = [
    ("max_steps", 0),
    ("seed", -1),
    ("weight_decay", math.nan),
    ("pad_to_multiple_of", "abc"),
    ("num_train_epochs", 0.0),
    ("logging_steps", -5.0),
    ("save_steps", 0.0),
    ("report_to", "wandbb"),
    ("cache_implementation", "statik"),
    ("max_completion_length", None),
    ("generation_kwargs", {"supress_tokens": [5]}),
    ("generation_kwargs", {"eos_token_id": 5}),
    ("lr_scheduler_kwargs", {"typo": 1}),
    ("accelerator_config", {"split_batches": True}),
    ("accelerator_config", {"split_batchs": True}),
]


@pytest.mark.parametrize(("name", "value"), WRITTEN, ids=str)
def test_a_refusal_is_the_same_from_python_yaml_and_the_command_line(name, value, tmp_path):
    written = {**CPU, "num_iterations": 2, "dro_beta": 0.5, "output_dir": str(tmp_path), name: value}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(written))
    said = []
    for build in (
        lambda: DROConfig(**written),
        lambda: DROParser((DROConfig,)).parse_args_and_config(["--config", str(tmp_path / "config.yaml")]),
        lambda: DROParser((DROConfig,)).parse_args_and_config(as_command_line(written)),
    ):
        with pytest.raises(ValueError, match=f"^{name}.* is refused: .*Write `") as refused:
            build()
        said.append(str(refused.value))
    assert said[1] == said[0]
    assert said[2] == said[0]


@pytest.mark.parametrize("value", [8, "8", "auto", "none", None])
def test_every_way_of_giving_a_multiple_to_pad_to_is_taken(value):
    padded = DROConfig(**CPU, dro_beta=0.5, num_iterations=2, pad_to_multiple_of=value).pad_to_multiple_of
    assert padded == (8 if value in (8, "8") else None)


@pytest.mark.parametrize("settings", GOOD, ids=lambda settings: str(settings)[:70])
def test_a_resolved_config_can_be_built_again_and_replaced(settings, tmp_path):
    config = DROConfig(**{**CPU, "num_iterations": 2, **settings}, output_dir=str(tmp_path))
    assert DROConfig(**config.to_dict()).to_dict() == config.to_dict()
    assert dataclasses.replace(config).to_dict() == config.to_dict()
    assert dataclasses.replace(config, seed=7).seed == 7


@pytest.mark.parametrize(
    ("changes", "geometry"),
    [
        ({"steps_per_generation": 4}, (4, 32)),
        ({"generation_batch_size": 64}, (8, 64)),
        ({"per_device_train_batch_size": 4}, (1, 4)),
        ({"gradient_accumulation_steps": 4}, (4, 32)),
    ],
)
def test_a_replaced_batch_size_takes_what_was_derived_from_it_along(changes, geometry):
    settings = {**CPU, "dro_beta": 0.5, "num_iterations": 3, "num_generations": 4}
    replaced = dataclasses.replace(DROConfig(**settings), **changes)
    assert (replaced.steps_per_generation, replaced.generation_batch_size) == geometry
    assert replaced.to_dict() == DROConfig(**settings, **changes).to_dict()


def test_batch_geometry_counts_the_processes_of_the_launcher(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"generation_batch_size=24 .* 8 \* 2 = 16.*generation_batch_size=16"):
        DROConfig(**CPU, dro_beta=0.5, num_iterations=2, generation_batch_size=24)


def test_numbers_of_numpy_become_pythons():
    import numpy

    config = DROConfig(
        **CPU, dro_beta=numpy.float32(0.5), num_iterations=numpy.int64(2), reward_weights=["1e-1", numpy.float64(2)]
    )
    assert (type(config.dro_beta), type(config.num_iterations)) == (float, int)
    assert config.reward_weights == [0.1, 2.0]
    assert json.loads(config.to_json_string())["dro_beta"] == 0.5


def test_a_config_dumps_to_plain_yaml():
    config = DROConfig(**CPU, dro_beta=0.5, num_iterations=2)
    sizes = {"steps_per_generation": config.steps_per_generation, "batch": config.generation_batch_size}
    for dump in (yaml.dump, yaml.safe_dump):
        assert yaml.safe_load(dump(sizes)) == {"steps_per_generation": 1, "batch": 8}


def test_the_old_name_of_activation_checkpointing_can_be_overridden_in_a_translation():
    source = GRPOConfig(**CPU, activation_checkpointing=False, scale_rewards="none", num_iterations=2)
    config = DROConfig.from_grpo_config(source, dro_beta=0.5, gradient_checkpointing=True)
    assert config.activation_checkpointing is True


def test_the_objective_is_built_from_either_way_of_giving_its_parameters():
    by_field = DROConfig(**CPU, num_iterations=2, dro_beta=0.5, dro_level="sequence")
    by_kwargs = DROConfig(**CPU, num_iterations=2, policy_loss_kwargs='{"beta": 0.5, "level": "sequence"}')
    assert by_field.build_policy_loss() == by_kwargs.build_policy_loss() == DRO(beta=0.5, level="sequence")


def test_defaults_are_dro_with_token_mean_on_unscaled_rewards():
    config = DROConfig(**CPU, dro_beta=0.5, num_iterations=2)
    assert (config.policy_loss, config.loss_agg_mode, config.anchor_policy) == ("dro", "token-mean", "old")
    assert (config.scale_rewards, config.dro_level) == ("none", "token")
    assert config.vllm_importance_sampling_correction is True


def test_the_sampling_anchor_turns_an_unset_correction_off():
    config = DROConfig(**CPU, dro_beta=0.5, anchor_policy="sampling", use_vllm=True)
    assert config.vllm_importance_sampling_correction is False


WARNINGS = [
    ({}, "penalty does nothing.*num_iterations=4.*anchor_policy='reference'.*anchor_policy='sampling'"),
    ({"gradient_accumulation_steps": 4}, "penalty does nothing"),
    ({"gradient_accumulation_steps": 4, "steps_per_generation": 2}, "penalty does nothing"),
    ({"gradient_accumulation_steps": 2, "steps_per_generation": 1, "num_iterations": 2}, "penalty does nothing"),
    ({"num_iterations": 2, "loss_agg_mode": "token-sum"}, "max_grad_norm=0.0"),
    ({"policy_loss": "gspo", "dro_beta": None}, "loss_agg_mode='seq-mean-token-mean'"),
    ({"anchor_policy": "sampling", "use_vllm": True, "top_p": 0.9}, "top_p=0.9"),
    ({"anchor_policy": "sampling", "use_vllm": True, "top_k": 50}, "top_k=50"),
    ({"anchor_policy": "sampling", "use_vllm": True, "min_p": 0.1}, "min_p=0.1"),
    ({"anchor_policy": "sampling", "use_vllm": True, "repetition_penalty": 1.1}, "repetition_penalty=1.1"),
    ({"num_iterations": 2, "generation_kwargs": {"temperature": 0.5}}, "temperature=0.5"),
    ({"num_iterations": 2, "neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0 .* Write `neftune_noise_alpha=None`"),
    ({"num_iterations": 2, "vllm_mode": "server"}, "vllm_mode='server' has no effect without use_vllm=True"),
    ({"num_iterations": 2, "ref_model_sync_steps": 8}, "no effect without sync_ref_model=True"),
    ({"num_iterations": 2, "entropy_target": 1.0}, "no effect without use_adaptive_entropy=True"),
    ({"num_iterations": 2, "log_unique_prompts": True}, "no effect without log_completions=True"),
]


@pytest.mark.parametrize(("settings", "message"), WARNINGS, ids=lambda part: str(part)[:60])
def test_a_doubtful_setting_draws_one_warning(settings, message):
    with pytest.warns(UserWarning) as caught:
        DROConfig(**CPU, **{"dro_beta": 0.5, **settings})
    assert len(caught) == 1
    assert re.search(message, str(caught[0].message))
    assert caught[0].filename == __file__


def test_a_temperature_in_generation_kwargs_becomes_the_temperature_that_scores():
    with pytest.warns(UserWarning, match="temperature"):
        config = DROConfig(
            **CPU, dro_beta=0.5, num_iterations=2, generation_kwargs={"temperature": 0.5, "suppress_tokens": [7]}
        )
    assert config.temperature == 0.5
    assert config.generation_kwargs == {"suppress_tokens": [7]}


# from_grpo_config


@pytest.mark.parametrize(
    ("source", "objective", "kwargs", "mode"),
    [
        ({}, "ppo_clip", {"epsilon_low": 0.2, "epsilon_high": 0.2, "dual_clip": None}, "token-mean"),
        (
            {"loss_type": "grpo", "epsilon": 0.1, "epsilon_high": 0.28, "delta": 2.0},
            "ppo_clip",
            {"epsilon_low": 0.1, "epsilon_high": 0.28, "dual_clip": 2.0},
            "seq-mean-token-mean",
        ),
        (
            {"loss_type": "dr_grpo"},
            "ppo_clip",
            {"epsilon_low": 0.2, "epsilon_high": 0.2, "dual_clip": None},
            "seq-mean-token-sum-norm",
        ),
        (
            {"loss_type": "bnpo"},
            "ppo_clip",
            {"epsilon_low": 0.2, "epsilon_high": 0.2, "dual_clip": None},
            "token-mean",
        ),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, "cispo", {"ratio_max": 5.0}, "token-mean"),
        (
            {"loss_type": "sapo", "sapo_temperature_pos": 0.9},
            "sapo",
            {"temperature_pos": 0.9, "temperature_neg": 1.05},
            "seq-mean-token-mean",
        ),
        (
            {"loss_type": "luspo", "importance_sampling_level": "sequence"},
            "gspo",
            {"epsilon_low": 0.2, "epsilon_high": 0.2},
            "seq-mean-token-sum",
        ),
        (
            {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4},
            "gspo",
            {"epsilon_low": 3e-4, "epsilon_high": 3e-4},
            "seq-mean-token-mean",
        ),
    ],
)
def test_without_a_beta_the_source_keeps_its_objective(source, objective, kwargs, mode):
    config = DROConfig.from_grpo_config(GRPOConfig(**CPU, activation_checkpointing=False, **source))
    assert (config.policy_loss, config.policy_loss_kwargs, config.loss_agg_mode) == (objective, kwargs, mode)
    assert isinstance(config.build_policy_loss(), (PPOClip, GSPO)) == (objective in ("ppo_clip", "gspo"))
    assert config.scale_rewards == "group"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"loss_type": "vespo"}, "loss_type='vespo' is refused.*does not decompose"),
        ({"loss_type": "typo"}, "loss_type='typo' is refused.*dapo"),
        ({"loss_type": "bnpo", "gradient_accumulation_steps": 2}, "loss_type='bnpo' is refused.*token-mean"),
        ({"loss_type": "cispo", "importance_sampling_level": "sequence"}, "importance_sampling_level='sequence'"),
        ({"loss_type": "grpo", "importance_sampling_level": "sequence", "delta": 2.0}, "delta=2.0 is refused"),
        ({"loss_type": "grpo", "delta": 1.1}, "delta=1.1 is refused.*inside the first"),
        (
            {"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.1},
            "use_bias_correction_kl=True is refused.*use_bias_correction_kl=False",
        ),
        (
            {"loss_type": "grpo", "importance_sampling_level": "sequence", "top_entropy_quantile": 0.2},
            "top_entropy_quantile=0.2 is refused",
        ),
        (
            {
                "loss_type": "luspo",
                "importance_sampling_level": "sequence",
                "use_vllm": True,
                "vllm_importance_sampling_mode": "token_mask",
            },
            "vllm_importance_sampling_mode='token_mask' is refused.*'sequence_mask'",
        ),
    ],
)
def test_a_source_without_an_equivalent_is_refused_with_the_reason(source, message):
    with pytest.raises(ValueError, match=message):
        DROConfig.from_grpo_config(GRPOConfig(**CPU, activation_checkpointing=False, **source))


def test_with_a_beta_the_source_becomes_dro_and_one_warning_lists_what_is_dropped():
    source = GRPOConfig(
        **CPU,
        activation_checkpointing=False,
        loss_type="grpo",
        epsilon_high=0.28,
        scale_rewards="none",
        num_iterations=2,
    )
    with pytest.warns(UserWarning) as caught:
        config = DROConfig.from_grpo_config(source, dro_beta=0.5)
    assert len(caught) == 1
    assert "loss_type='grpo', epsilon_high=0.28" in str(caught[0].message)
    assert caught[0].filename == __file__
    assert config.loss_agg_mode == "seq-mean-token-mean"
    assert config.build_policy_loss() == DRO(beta=0.5)
    assert config.num_iterations == 2


def test_reward_scaling_of_the_source_is_kept_and_said():
    source = GRPOConfig(**CPU, activation_checkpointing=False, num_iterations=2)
    with pytest.warns(UserWarning, match="scale_rewards='group' is kept") as caught:
        config = DROConfig.from_grpo_config(source, dro_beta=0.5)
    assert len(caught) == 1
    assert config.scale_rewards == "group"
    assert DROConfig.from_grpo_config(source, dro_beta=0.5, scale_rewards="none").scale_rewards == "none"


def test_overrides_win_and_derived_batch_geometry_follows_them():
    source = GRPOConfig(**CPU, activation_checkpointing=False, scale_rewards="none")
    config = DROConfig.from_grpo_config(source, dro_beta=0.5, num_iterations=2, gradient_accumulation_steps=4)
    assert config.steps_per_generation == 4
    assert config.generation_batch_size == 32
    sized = DROConfig.from_grpo_config(source, dro_beta=0.5, num_iterations=2, generation_batch_size=24)
    assert sized.steps_per_generation == 3
    other = DROConfig.from_grpo_config(source, policy_loss="reinforce")
    assert (other.policy_loss, other.policy_loss_kwargs) == ("reinforce", None)
    sampled = DROConfig.from_grpo_config(source, dro_beta=0.5, anchor_policy="sampling")
    assert sampled.vllm_importance_sampling_correction is False


def test_a_derived_geometry_is_kept_when_it_was_the_sources_wish():
    source = GRPOConfig(
        **CPU,
        activation_checkpointing=False,
        scale_rewards="none",
        gradient_accumulation_steps=2,
        steps_per_generation=8,
    )
    config = DROConfig.from_grpo_config(source, dro_beta=0.5, per_device_train_batch_size=4)
    assert (config.steps_per_generation, config.generation_batch_size) == (8, 32)


def test_another_objective_keeps_the_aggregation_and_says_what_it_drops():
    source = GRPOConfig(
        **CPU, activation_checkpointing=False, loss_type="grpo", epsilon=0.3, delta=4.0, num_iterations=2
    )
    with pytest.warns(
        UserWarning, match=r"policy_loss='reinforce' replaces.*loss_type='grpo', epsilon=0.3, delta=4.0"
    ):
        config = DROConfig.from_grpo_config(source, policy_loss="reinforce")
    assert config.loss_agg_mode == "seq-mean-token-mean"
    with pytest.warns(UserWarning, match="loss_agg_mode='token-mean'"):
        config = DROConfig.from_grpo_config(source, policy_loss="reinforce", loss_agg_mode="token-mean")
    assert config.loss_agg_mode == "token-mean"


def test_parameters_given_to_the_translation_are_laid_over_the_sources():
    source = GRPOConfig(**CPU, activation_checkpointing=False, epsilon=0.3)
    config = DROConfig.from_grpo_config(source, policy_loss_kwargs={"dual_clip": 2.0})
    assert config.policy_loss_kwargs == {"epsilon_low": 0.3, "epsilon_high": 0.3, "dual_clip": 2.0}


def test_means_over_sequences_say_that_masked_rows_count_otherwise():
    source = GRPOConfig(**CPU, activation_checkpointing=False, loss_type="grpo", mask_truncated_completions=True)
    with pytest.warns(UserWarning, match="TRL divides by the masked ones too"):
        DROConfig.from_grpo_config(source)


def test_an_unknown_field_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"no field 'learning_rat'\. Nearest: 'learning_rate'"):
        DROConfig.from_grpo_config(GRPOConfig(**CPU, activation_checkpointing=False), learning_rat=1e-5)


def test_what_is_not_a_grpo_config_is_refused():
    with pytest.raises(ValueError, match=r"dataclasses\.replace"):
        DROConfig.from_grpo_config(DROConfig(**CPU, dro_beta=0.5, num_iterations=2))
    with pytest.raises(ValueError, match=r"must be a trl\.GRPOConfig"):
        DROConfig.from_grpo_config({"dro_beta": 0.5})


def test_a_subclass_with_fields_of_its_own_is_refused_by_their_names():
    @dataclasses.dataclass
    class Mine(GRPOConfig):
        curriculum: int = 3

    with pytest.raises(ValueError, match="curriculum"):
        DROConfig.from_grpo_config(Mine(**CPU, activation_checkpointing=False))


def test_a_subclass_of_the_config_can_be_translated_to():
    @dataclasses.dataclass
    class Source(GRPOConfig):
        curriculum: int = 3

    @dataclasses.dataclass
    class Target(DROConfig):
        curriculum: int = 1

    source = Source(**CPU, activation_checkpointing=False, scale_rewards="none", num_iterations=2)
    assert Target.from_grpo_config(source, dro_beta=0.5).curriculum == 3


def test_every_replaced_knob_of_trl_has_its_default_there():
    """The refusals compare with TRL's defaults, so a renamed field must fail here."""
    assert REPLACED.keys() <= {field.name for field in dataclasses.fields(GRPOConfig)}


def test_building_a_config_warns_of_nothing_by_itself():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DROConfig(**CPU, dro_beta=0.5, num_iterations=2)
