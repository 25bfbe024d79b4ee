"""Where every option of TRL's `GRPOConfig` stands. A field that TRL adds fails here until somebody decides."""

import dataclasses

import pytest
from trl import GRPOConfig

from trl_dro import DROConfig
from trl_dro.config_rules import IDLE, REPLACED


CPU = {"use_cpu": True, "bf16": False, "report_to": "none", "num_iterations": 2, "dro_beta": 0.5}

# Must stay at the default: another value is a ValueError that names what to write instead.
REFUSED = {
    "loss_type": "grpo",
    "importance_sampling_level": "sequence",
    "epsilon": 0.1,
    "epsilon_high": 0.28,
    "delta": 2.0,
    "sapo_temperature_neg": 2.0,
    "sapo_temperature_pos": 2.0,
    "vespo_k_pos": 1.0,
    "vespo_lambda_pos": 1.0,
    "vespo_k_neg": 1.0,
    "vespo_lambda_neg": 1.0,
    "label_smoothing_factor": 0.1,
    "bf16_full_eval": True,
    "fp16_full_eval": True,
    "auto_find_batch_size": True,
    "train_sampling_strategy": "sequential",
    "data_seed": 7,
}

# Read, and turned into something else: (given, field to look at, what it becomes).
TRANSLATED = {
    "gradient_checkpointing": (False, "activation_checkpointing", False),
    "gradient_checkpointing_kwargs": (
        {"use_reentrant": False},
        "activation_checkpointing_kwargs",
        {"use_reentrant": False},
    ),
    "generation_batch_size": (32, "steps_per_generation", 4),
    "vllm_importance_sampling_correction": (None, "vllm_importance_sampling_correction", True),
    "use_transformers_paged": (True, "use_transformers_continuous_batching", True),
    "vllm_importance_sampling_cap": (2.5, "vllm_importance_sampling_clip_max", 2.5),
    "parallelism_config": (None, "parallelism_config", None),
}

# Nothing in online RL reads them: set, they draw a warning.
IDLE_VALUES = {
    "label_names": ["labels"],
    "length_column_name": "size",
    "include_for_metrics": ["inputs"],
    "batch_eval_metrics": True,
    "average_tokens_across_devices": False,
}

# Honoured, but at odds with the objective: set, they draw a warning.
DOUBTFUL = {"neftune_noise_alpha": 5.0}

# The training loop's own but for a few of their keys, which are refused.
REFUSED_KEYS = {
    "accelerator_config": [
        {"split_batches": True},
        {"dispatch_batches": True},
        {"gradient_accumulation_kwargs": {"num_steps": 4}},
    ],
}

# Part of how DRO trains: the trainer reads them itself, or passes through TRL code that does.
HONOURED = set(
    """
    beta use_bias_correction_kl sync_ref_model ref_model_mixup_alpha ref_model_sync_steps disable_dropout
    top_entropy_quantile entropy_coef use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta
    entropy_target router_aux_loss_coef off_policy_mask_threshold mask_truncated_completions num_iterations
    steps_per_generation gradient_accumulation_steps per_device_train_batch_size num_generations num_generations_eval
    reward_weights multi_objective_aggregation scale_rewards max_completion_length pad_to_multiple_of
    cast_lm_head_to_fp32 model_init_kwargs trust_remote_code temperature top_p top_k min_p repetition_penalty
    generation_kwargs chat_template_kwargs cache_implementation max_tool_calling_iterations
    use_vllm vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_server_base_url
    vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization
    vllm_max_model_length vllm_tensor_parallel_size vllm_importance_sampling_mode vllm_importance_sampling_clip_max
    vllm_importance_sampling_clip_min use_transformers_continuous_batching transformers_continuous_batching_config
    ds3_gather_for_generation shuffle_dataset remove_unused_columns log_completions log_multimodal
    num_completions_to_print log_unique_prompts log_completions_hub_repo per_device_eval_batch_size
    """.split()
)

# The training loop's own: transformers and accelerate read them, the objective neither sees nor changes them.
UNAFFECTED = set(
    """
    output_dir num_train_epochs max_steps learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps optim
    optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon optim_target_modules
    max_grad_norm bf16 fp16 tf32 activation_checkpointing activation_checkpointing_kwargs
    torch_compile torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config use_cache
    torch_empty_cache_steps logging_strategy logging_steps logging_first_step log_on_each_node
    logging_nan_inf_filter include_num_input_tokens_seen log_level log_level_replica disable_tqdm report_to run_name
    project trackio_space_id trackio_bucket_id trackio_static_space_id eval_strategy eval_steps eval_delay
    prediction_loss_only eval_on_start eval_do_concat_batches eval_use_gather_object eval_accumulation_steps
    save_only_model save_strategy save_steps save_on_each_node save_total_limit
    enable_jit_checkpoint push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision
    load_best_model_at_end metric_for_best_model greater_is_better ignore_data_skip
    restore_callback_states_from_checkpoint full_determinism seed use_cpu
    dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers
    dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order
    ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout fsdp
    fsdp_config deepspeed debug skip_memory_metrics do_train do_eval do_predict resume_from_checkpoint local_rank
    """.split()
)


def test_every_field_of_trl_stands_in_exactly_one_place():
    groups = [set(REFUSED), set(TRANSLATED), set(IDLE_VALUES), set(DOUBTFUL), set(REFUSED_KEYS), HONOURED, UNAFFECTED]
    fields = {field.name for field in dataclasses.fields(GRPOConfig) if field.init}
    placed = set().union(*groups)
    assert sum(map(len, groups)) == len(placed), "a field stands twice"
    assert fields - placed == set(), "TRL has fields that nobody decided about"
    assert placed - fields == set(), "TRL no longer has these fields"


@pytest.mark.parametrize(("name", "value"), REFUSED.items())
def test_a_refused_field_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"^{name}="):
        DROConfig(**{**CPU, name: value})


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in REFUSED_KEYS for value in REFUSED_KEYS[name]])
def test_a_refused_key_is_refused_by_name(name, value):
    (key,) = value
    with pytest.raises(ValueError, match=rf"^{name}\['{key}'\]"):
        DROConfig(**{**CPU, name: value})


@pytest.mark.parametrize(("name", "value"), DOUBTFUL.items())
def test_a_doubtful_field_is_kept_with_a_warning(name, value):
    with pytest.warns(UserWarning, match=f"^{name}={value}"):
        assert getattr(DROConfig(**{**CPU, name: value}), name) == value


def test_the_loss_knobs_among_them_are_those_the_config_lists():
    assert REPLACED.keys() <= REFUSED.keys()
    assert IDLE.keys() == IDLE_VALUES.keys()


@pytest.mark.filterwarnings("ignore:`use_transformers_paged` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:The `vllm_importance_sampling_cap` argument is deprecated:FutureWarning")
@pytest.mark.parametrize(("name", "case"), TRANSLATED.items())
def test_a_translated_field_becomes_what_it_should(name, case):
    value, target, expected = case
    extra = {"use_vllm": True} if name == "vllm_importance_sampling_cap" else {}
    assert getattr(DROConfig(**CPU, **extra, **{name: value}), target) == expected


@pytest.mark.parametrize(("name", "value"), IDLE_VALUES.items())
def test_an_idle_field_says_that_it_has_no_effect(name, value):
    with pytest.warns(UserWarning, match=f"^{name}=.* has no effect"):
        DROConfig(**CPU, **{name: value})


def test_defaults_are_trls_but_for_the_few_that_are_documented():
    changed = {"scale_rewards", "vllm_importance_sampling_correction"}
    ours = {field.name: field.default for field in dataclasses.fields(DROConfig)}
    for field in dataclasses.fields(GRPOConfig):
        if field.init and field.name not in changed and field.default is not dataclasses.MISSING:
            assert ours[field.name] == field.default, field.name
