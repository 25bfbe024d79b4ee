"""Settings that TRL takes and then ignores, or trips over once a model is loaded: shown on `GRPOTrainer`, gone here.

When one of the `GRPOTrainer` tests fails, TRL has mended it, and what closes it here can go.
The file is its own child script for two processes: `python -m tests.test_inherited_config_faults DIRECTORY`.
"""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from trl_dro import DROConfig, DROTrainer

from .tiny import FAST, prompts, tiny_model, tiny_tokenizer


LETTERS = list(range(4, 20))  # tokens that a sampled completion hits soon


def losses(build, trainer_class, **settings) -> list[float]:
    trainer = build(trainer_class, settings=settings)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


# generation_kwargs


def padding_trained_on(trainer) -> int:
    """How many padding tokens the first batch trains on."""
    batches, generate = [], trainer._generate_and_score_completions

    def watching(inputs):
        batches.append(generate(inputs))
        return batches[-1]

    trainer._generate_and_score_completions = watching
    trainer.train()
    padding = (batches[0]["completion_ids"] == trainer.processing_class.pad_token_id) & (
        batches[0]["completion_mask"] == 1
    )
    return int(padding.sum())


def test_trl_trains_on_the_padding_after_an_end_token_of_generation_kwargs(build):
    # The pad token is never sampled here, so what there is of it is padding.
    kwargs = {"eos_token_id": LETTERS, "suppress_tokens": [0]}
    assert padding_trained_on(build(GRPOTrainer, settings={"generation_kwargs": kwargs})) > 0


def test_an_end_token_of_generation_kwargs_is_refused_and_the_model_has_the_place_for_it(build):
    with pytest.raises(ValueError, match=r"\['eos_token_id'\]=.*model\.generation_config\.eos_token_id"):
        build(DROTrainer, settings={"generation_kwargs": {"eos_token_id": LETTERS}})
    model = tiny_model()
    model.generation_config.eos_token_id = LETTERS
    trainer = build(DROTrainer, model=model, settings={"generation_kwargs": {"suppress_tokens": [0]}})
    assert padding_trained_on(trainer) == 0
    assert trainer.state.log_history[0]["completions/mean_terminated_length"] > 0


@pytest.mark.parametrize("unknown", [{"supress_tokens": [5]}, {"top_pp": 0.1}, {"seed": 7}], ids=str)
def test_an_unknown_name_in_generation_kwargs_does_nothing_in_trl_and_is_refused_here(build, unknown):
    assert losses(build, GRPOTrainer, generation_kwargs=unknown) == losses(build, GRPOTrainer)
    with pytest.raises(ValueError, match="no option of this name"):
        build(DROTrainer, settings={"generation_kwargs": unknown})


@pytest.mark.parametrize(
    ("kwargs", "error"),
    [
        ({"return_dict_in_generate": True}, TypeError),
        ({"stop_strings": ["a"]}, ValueError),
        ({"token_healing": True}, ValueError),
        ({"disable_compile": True}, TypeError),
    ],
    ids=str,
)
def test_what_the_trainer_cannot_generate_with_fails_late_in_trl_and_early_here(build, kwargs, error):
    with pytest.raises(error) as late:
        build(GRPOTrainer, settings={"generation_kwargs": kwargs}).train()
    assert "is refused" not in str(late.value)
    with pytest.raises(ValueError, match="is refused"):
        DROConfig(**FAST, dro_beta=0.5, generation_kwargs=kwargs)


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default `max_length`")
def test_no_completion_length_is_twenty_tokens_in_trl_and_refused_here(build):
    seen = []

    def longest(completion_ids, **_):
        seen.append(max(map(len, completion_ids)))
        return [float(len(ids)) for ids in completion_ids]

    settings = {"max_completion_length": None, "generation_kwargs": {"suppress_tokens": [2]}}
    build(GRPOTrainer, reward_funcs=longest, settings=settings).train()
    assert max(seen) == 20
    with pytest.raises(ValueError, match="max_completion_length=None is refused"):
        build(DROTrainer, settings=settings)


# Accelerate's dataloader


def rows_of_one_process(directory: str) -> None:
    """Write how many completions TRL generates for this process of two, with split batches."""
    counts = []

    def count(completions, **_):
        counts.append(len(completions))
        return [0.0] * len(completions)

    args = GRPOConfig(**FAST, output_dir=directory, accelerator_config={"split_batches": True})
    trainer = GRPOTrainer(tiny_model(), count, args, train_dataset=prompts(), processing_class=tiny_tokenizer())
    trainer.train()
    planned = args.generation_batch_size // trainer.accelerator.num_processes
    (Path(directory) / f"rank{trainer.accelerator.process_index}").write_text(f"{counts[0]} of {planned}")
    trainer.accelerator.wait_for_everyone()
    os._exit(0)  # a process group that is taken down may end in an abort


def test_split_batches_halve_what_two_processes_generate_in_trl_and_are_refused_here(tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*launcher, "-m", "tests.test_inherited_config_faults", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent.parent,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1"},
    )
    assert done.returncode == 0, done.stderr[-5000:]
    assert [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)] == ["4 of 8", "4 of 8"]
    with pytest.raises(ValueError, match=r"accelerator_config\['split_batches'\]=True is refused"):
        DROConfig(**FAST, dro_beta=0.5, accelerator_config={"split_batches": True})


def test_dispatched_batches_are_a_type_error_in_trl_and_refused_here(build):
    settings = {"accelerator_config": {"dispatch_batches": True}}
    with pytest.raises(TypeError, match="batch size of tensors"):
        build(GRPOTrainer, settings=settings).train()
    with pytest.raises(ValueError, match=r"accelerator_config\['dispatch_batches'\]=True is refused"):
        build(DROTrainer, settings=settings)


def test_an_accumulation_of_accelerate_changes_trls_after_its_batches_are_planned(build):
    def settings():  # transformers changes the inner dict
        return {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 4}}}

    args = build(GRPOTrainer, settings=settings()).args
    assert (args.gradient_accumulation_steps, args.steps_per_generation) == (4, 1)  # planned: the same
    with pytest.raises(ValueError, match="gradient_accumulation_steps=4"):
        build(DROTrainer, settings=settings())


# Numbers


def test_no_steps_are_one_in_trl_and_refused_here(build):
    trainer = build(GRPOTrainer, settings={"max_steps": 0})
    trainer.train()
    assert trainer.state.global_step == 1
    with pytest.raises(ValueError, match="max_steps=0 is refused"):
        build(DROTrainer, settings={"max_steps": 0})


def test_no_epochs_train_nothing_in_trl_and_are_refused_here(build):
    settings = {"max_steps": -1, "num_train_epochs": 0}
    trainer = build(GRPOTrainer, settings=settings)
    trainer.train()
    assert trainer.state.global_step == 0
    with pytest.raises(ValueError, match="num_train_epochs=0 is refused"):
        build(DROTrainer, settings=settings)


@pytest.mark.parametrize("setting", [{"weight_decay": math.nan}, {"adam_epsilon": 0.0}], ids=str)
def test_a_setting_of_the_optimizer_makes_weights_nan_in_trl_and_is_refused_here(build, setting):
    trainer = build(GRPOTrainer, settings=setting)
    trainer.train()
    assert any(parameter.isnan().any() for parameter in trainer.model.parameters())
    with pytest.raises(ValueError, match="is refused"):
        build(DROTrainer, settings=setting)


def test_a_negative_logging_interval_never_comes_in_trl_and_is_refused_here(build):
    trainer = build(GRPOTrainer, settings={"logging_steps": -5})
    trainer.train()
    assert not any("loss" in entry for entry in trainer.state.log_history)
    with pytest.raises(ValueError, match="logging_steps=-5 is refused"):
        build(DROTrainer, settings={"logging_steps": -5})


@pytest.mark.parametrize(
    "setting",
    [
        {"max_steps": 1.5},
        {"pad_to_multiple_of": 0},
        {"seed": -1},
        {"adam_beta1": 2.0},
        {"neftune_noise_alpha": math.nan},
        {"report_to": "wandbb"},
        {"cache_implementation": "typo"},
        {"lr_scheduler_kwargs": {"typo": 1}},
        {"log_level": "typo"},
    ],
    ids=str,
)
def test_a_bad_value_passes_trls_config_and_not_ours(setting):
    GRPOConfig(**{**FAST, **setting})
    with pytest.raises(ValueError, match="is refused"):
        DROConfig(**{**FAST, "dro_beta": 0.5, **setting})


# Noise on the embeddings


def test_neftune_clips_before_the_policy_moves_in_trl_and_draws_a_warning_here(build):
    trainer = build(GRPOTrainer, settings={"neftune_noise_alpha": 50.0})
    trainer.train()
    assert trainer.state.log_history[0]["clip_ratio/region_mean"] > 0  # 0 without noise
    with pytest.warns(UserWarning, match=r"neftune_noise_alpha=50\.0 adds new noise"):
        trainer = build(DROTrainer, settings={"neftune_noise_alpha": 50.0})
    trainer.train()
    assert trainer.state.log_history[0]["dro/log_ratio_abs"] > 0
    assert all(torch.isfinite(parameter).all() for parameter in trainer.model.parameters())


if __name__ == "__main__":
    rows_of_one_process(sys.argv[1])
