"""Faults of TRL's trainer that users of this package would meet: each shown on `GRPOTrainer`, and gone here.

When one of the `GRPOTrainer` tests fails, TRL has mended it, and what closes it here can go.
"""

import math
import re

import numpy
import pytest
import torch
import trl.trainer.utils
from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3ForCausalLM, TrainerCallback
from trl import GRPOTrainer

from trl_dro import DROTrainer
from trl_dro.models import add_reference_adapter, count_positions_from_the_mask

from .tiny import CHARACTERS, length_reward, prompts, tiny_model, tiny_tokenizer


def scripted(prompts, trainer) -> dict:
    completion_ids = [[4 + (index + token) % 26 for token in range(1 + index % 5)] for index in range(len(prompts))]
    return {
        "prompt_ids": [trainer.processing_class(prompt)["input_ids"] for prompt in prompts],
        "completion_ids": completion_ids,
        "logprobs": [[-3.0] * len(row) for row in completion_ids],
    }


# A dataset smaller than one generation batch


def test_trl_trains_nothing_on_a_small_dataset_and_says_nothing(build):
    trainer = build(GRPOTrainer, train_dataset=prompts(1))
    trainer.train()
    assert trainer.state.global_step == 0


def test_a_dataset_smaller_than_one_generation_batch_is_refused(build):
    with pytest.raises(ValueError, match=r"train_dataset has 1 rows, one generation batch takes 2 prompts"):
        build(DROTrainer, train_dataset=prompts(1))


def test_a_stream_that_ends_before_the_first_step_is_an_error(build):
    trainer = build(DROTrainer, train_dataset=prompts(1).to_iterable_dataset())
    with pytest.raises(ValueError, match="ended before its first optimizer step: one takes 8 completions"):
        trainer.train()


def test_a_run_that_a_callback_stops_before_its_first_step_is_no_error(build):
    class Stop(TrainerCallback):
        def on_substep_end(self, args, state, control, **kwargs):
            control.should_training_stop = True

    trainer = build(DROTrainer, settings={"gradient_accumulation_steps": 2}, callbacks=[Stop()])
    trainer.train()
    assert trainer.state.global_step == 0


# Rewards


def infinite(completions, **_) -> list[float]:
    return [math.inf if index == 1 else 1.0 * index for index in range(len(completions))]


def test_an_infinite_reward_kills_a_group_in_trl(build):
    trainer = build(GRPOTrainer, reward_funcs=infinite)
    trainer.train()
    assert trainer.state.log_history[0]["reward"] == math.inf


BAD_REWARDS = [
    (infinite, r"reward function 'infinite' at step 0 returned inf for row 1. Return a finite number"),
    (
        lambda completions, **_: [math.nan] * len(completions),
        r"'<lambda>' at step 0 returned nan for row 0. Return None",
    ),
    (lambda completions, **_: [1.0], r"returned 1 rewards for 8 completions"),
    (lambda completions, **_: None, r"returned None: it must return a list of 8 numbers"),
    (lambda completions, **_: ["good"] * len(completions), r"returned 'good' for row 0"),
]


@pytest.mark.parametrize(("reward", "message"), BAD_REWARDS, ids=["inf", "nan", "too few", "nothing", "text"])
def test_a_bad_reward_is_refused_with_function_step_and_row(build, reward, message):
    trainer = build(DROTrainer, reward_funcs=reward)
    with pytest.raises(ValueError, match=message):
        trainer.train()


def test_a_reward_that_raises_says_which_function_at_which_step(build):
    def fragile(completions, trainer_state, **_):
        if trainer_state.global_step == 2:
            raise KeyError("answer")
        return length_reward(completions)

    trainer = build(DROTrainer, reward_funcs=fragile, settings={"max_steps": 4})
    with pytest.raises(KeyError) as raised:
        trainer.train()
    assert raised.value.__notes__[0] == "Raised by reward function 'fragile' at step 2."


async def async_infinite(completions, **_) -> list[float]:
    return infinite(completions)


def test_async_rewards_and_rewards_of_a_class_are_checked_too(build):
    class Judge:
        def __call__(self, completions, **_):
            return torch.full((len(completions),), math.nan)

    for reward, name in ((async_infinite, "async_infinite"), (Judge(), "Judge")):
        with pytest.raises(ValueError, match=f"reward function '{name}' at step 0 returned"):
            build(DROTrainer, reward_funcs=[reward]).train()


@pytest.mark.parametrize(
    "shape",
    [
        lambda values: torch.tensor(values),
        lambda values: torch.tensor(values)[:, None],
        lambda values: numpy.array(values),
        lambda values: [torch.tensor(value) for value in values],
        lambda values: [numpy.bool_(value > 0) for value in values],
        lambda values: tuple(values),
        lambda values: (value for value in values),
    ],
    ids=["tensor", "column", "array", "list of tensors", "list of numpy bools", "tuple", "generator"],
)
def test_rewards_in_any_usual_shape_are_taken_as_trl_takes_them(build, shape):
    def reward(completions, **_):
        return shape([float(index % 3) for index in range(len(completions))])

    trainer = build(DROTrainer, reward_funcs=reward)
    trainer.train()
    assert trainer.state.log_history[0]["reward"] > 0


def test_a_reward_too_large_for_float32_is_refused(build):
    trainer = build(DROTrainer, reward_funcs=lambda completions, **_: [1e300] * len(completions))
    with pytest.raises(ValueError, match=r"returned 1e\+300 for row 0. Return a finite number of at most 1e\+30"):
        trainer.train()


def test_an_infinite_reward_of_a_reward_model_is_refused_with_its_row(build, monkeypatch):
    def scores(self, inputs, prompts, completions, completion_ids_list):
        return torch.tensor([[0.0], [math.inf], *[[1.0]] * (len(prompts) - 2)])

    monkeypatch.setattr(GRPOTrainer, "_calculate_rewards", scores)
    with pytest.raises(ValueError, match="reward 'length_reward' is infinite for row 1 at step 0"):
        build(DROTrainer).train()


def test_none_still_means_that_a_reward_does_not_apply(build):
    def sometimes(completions, **_):
        return [None if index % 2 else float(index) for index in range(len(completions))]

    trainer = build(DROTrainer, reward_funcs=[sometimes, length_reward])
    trainer.train()
    assert math.isfinite(trainer.state.log_history[0]["reward"])
    assert "rewards/sometimes/mean" in trainer.state.log_history[0]


# Columns


def test_a_reserved_column_breaks_rewards_in_trl(build):
    trainer = build(GRPOTrainer, train_dataset=prompts(8).add_column("completions", ["x"] * 8))
    with pytest.raises(TypeError, match="multiple values for keyword argument 'completions'"):
        trainer.train()


@pytest.mark.parametrize(
    "column", ["prompts", "completions", "trainer_state", "log_extra", "log_metric", "environments"]
)
def test_a_reserved_column_is_refused_with_another_name_for_it(build, column):
    rows = prompts(8).add_column(column, ["x"] * 8)
    message = re.escape(f"column '{column}'") + f".*rename_column\\('{column}', 'my_{column}'\\)"
    with pytest.raises(ValueError, match=message):
        build(DROTrainer, train_dataset=rows)
    with pytest.raises(ValueError, match=f"^eval_dataset has a {message}"):
        build(DROTrainer, eval_dataset=rows)


def test_a_dataset_without_prompts_is_refused(build):
    rows = Dataset.from_dict({"question": ["a="] * 8})
    with pytest.raises(
        ValueError, match=r"no column 'prompt' \(it has: question\).*rename_column\('question', 'prompt'\)"
    ):
        build(DROTrainer, train_dataset=rows)


# Empty completions


def sometimes_silent(prompts, trainer) -> dict:
    output = scripted(prompts, trainer)
    output["completion_ids"][0], output["logprobs"][0] = [], []
    return {**output, "env_mask": [[1] * len(row) for row in output["completion_ids"]]}


def test_an_empty_completion_is_an_index_error_in_trl(build):
    with pytest.raises(IndexError):
        build(GRPOTrainer, rollout_func=sometimes_silent).train()


@pytest.mark.parametrize("anchor", ["old", "sampling"])
def test_an_empty_completion_trains_as_one_end_of_sequence(build, anchor):
    trainer = build(DROTrainer, rollout_func=sometimes_silent, settings={"anchor_policy": anchor})
    trainer.train()
    assert trainer.state.log_history[0]["completions/min_length"] == 1.0
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())


def test_rollouts_of_arrays_train_as_in_trl(build):
    def arrays(prompts, trainer):
        output = scripted(prompts, trainer)
        return {**output, "completion_ids": [numpy.array(row) for row in output["completion_ids"]]}

    trainer = build(DROTrainer, rollout_func=arrays)
    trainer.train()
    assert trainer.state.global_step == 2


def test_an_engine_that_returns_nothing_for_a_prompt_trains_too(build, monkeypatch):
    def silent(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
        return [[] if index == 0 else [5, 6, 2] for index in range(len(prompt_ids))], None

    monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", silent)
    trainer = build(DROTrainer)
    trainer.train()
    assert trainer.state.log_history[0]["completions/min_length"] == 1.0


# Evaluation


def test_an_evaluation_batch_of_broken_groups_is_a_reshape_error_in_trl(build):
    trainer = build(GRPOTrainer, eval_dataset=prompts(8), settings={"per_device_eval_batch_size": 6})
    with pytest.raises(RuntimeError, match="shape"):
        trainer.evaluate()


def test_an_evaluation_batch_of_broken_groups_is_refused_by_name(build):
    trainer = build(DROTrainer, eval_dataset=prompts(8), settings={"per_device_eval_batch_size": 6})
    with pytest.raises(ValueError, match=r"per_device_eval_batch_size=6 is refused.*per_device_eval_batch_size=4"):
        trainer.evaluate()


def test_evaluation_scores_the_old_policy_in_trl_and_not_here(build):
    counts = []
    for trainer_class in (GRPOTrainer, DROTrainer):
        trainer = build(trainer_class, eval_dataset=prompts(8), settings={"per_device_eval_batch_size": 32})
        passes, score = [], trainer._get_per_token_logps_and_entropies
        trainer._get_per_token_logps_and_entropies = lambda *a, p=passes, s=score, **k: p.append(1) or s(*a, **k)
        trainer.evaluate()
        counts.append(len(passes))
    assert counts == [2, 1]


# Absolute positions


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(CHARACTERS) + 4,
        n_positions=64,
        n_embd=16,
        n_layer=1,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        initializer_range=0.5,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return GPT2LMHeadModel(config)


def padded_and_bare_logps(trainer) -> tuple[torch.Tensor, torch.Tensor]:
    prompt, completion = [5, 6, 7], [8, 9, 10, 11]
    bare = torch.tensor([prompt + completion])
    padded = torch.tensor([[0] * 4 + prompt + completion])
    results = []
    with torch.no_grad():
        for ids in (padded, bare):
            results.append(trainer._get_per_token_logps_and_entropies(trainer.model, ids, (ids != 0).long(), 4)[0])
    return results[0], results[1]


def test_left_padding_changes_the_log_probs_of_gpt2_in_trl(build):
    padded, bare = padded_and_bare_logps(build(GRPOTrainer, model=gpt2()))
    assert (padded - bare).abs().max() > 0.1


def test_left_padding_does_not_change_the_log_probs_of_gpt2(build):
    padded, bare = padded_and_bare_logps(build(DROTrainer, model=gpt2()))
    torch.testing.assert_close(padded, bare)


def test_a_gpt2_adapter_scores_independently_of_left_padding_too(build):
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
    padded, bare = padded_and_bare_logps(build(DROTrainer, model=gpt2(), peft_config=adapter))
    torch.testing.assert_close(padded, bare)


def test_models_with_rotary_positions_and_multimodal_ones_get_no_position_ids(build):
    from .test_vlm import tiny_vlm

    for model in (tiny_model(), tiny_vlm()):
        count_positions_from_the_mask(model)
        assert not model._forward_pre_hooks


# Named adapters


def named_adapter():
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    return peft.get_peft_model(tiny_model(), lora, adapter_name="mine")


def test_an_adapter_of_another_name_is_a_key_error_in_trl(build):
    with pytest.raises(KeyError, match="default"):
        build(GRPOTrainer, model=named_adapter(), settings={"beta": 0.1})


def test_an_adapter_of_any_name_has_its_own_copy_as_reference(build):
    trainer = build(DROTrainer, model=named_adapter(), settings={"beta": 0.1})
    trainer.train()
    history = trainer.state.log_history
    assert history[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert history[1]["kl"] > 0.0


@pytest.mark.parametrize(
    "targets",
    [
        {"target_modules": ["q_proj"], "use_dora": True},
        {"target_modules": ["embed_tokens"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ],
    ids=str,
)
def test_the_reference_of_an_adapter_gives_the_same_logits(targets):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, task_type="CAUSAL_LM", init_lora_weights=False, **targets)
    model = peft.get_peft_model(tiny_model(), config, adapter_name="mine").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "mine" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
        ids = torch.tensor([[4, 5, 6, 7]])
        expected = model(ids).logits
        add_reference_adapter(model)
        torch.testing.assert_close(model(ids).logits, expected)
        model.set_adapter("ref")
        torch.testing.assert_close(model(ids).logits, expected)


def test_two_active_adapters_are_refused_as_having_no_single_reference(build):
    model = named_adapter()
    model.add_adapter("other", model.peft_config["mine"])
    model.base_model.set_adapter(["mine", "other"])
    with pytest.raises(ValueError, match=r"\['mine', 'other'\] active"):
        build(DROTrainer, model=model, settings={"beta": 0.1})


# Resuming in a later epoch


def order_of_prompts(build, trainer_class, resume: bool) -> list[str]:
    settings = {
        "max_steps": -1,
        "num_train_epochs": 3,
        "num_iterations": 1,
        "per_device_train_batch_size": 4,
        "save_strategy": "steps",
        "save_steps": 6,
    }
    seen: list[str] = []

    def watching(prompts, completions, **_):
        seen.append(prompts[0])
        return length_reward(completions)

    def make():
        return build(trainer_class, train_dataset=prompts(4), reward_funcs=watching, settings=settings)

    trainer = make()
    trainer.train()
    if resume:
        seen.clear()
        checkpoint = f"{trainer.args.output_dir}/checkpoint-6"  # in the middle of the second epoch
        trainer = make()
        trainer.train(resume_from_checkpoint=checkpoint)
    return seen


@pytest.mark.filterwarnings("ignore:DRO's penalty does nothing:UserWarning")
def test_a_resumed_second_epoch_replays_the_first_in_trl_and_goes_on_here(build):
    orders = {
        trainer_class: (order_of_prompts(build, trainer_class, False), order_of_prompts(build, trainer_class, True))
        for trainer_class in (GRPOTrainer, DROTrainer)
    }
    whole, resumed = orders[GRPOTrainer]
    assert resumed != whole[6:]
    assert resumed[:2] == whole[2:4]
    assert orders[DROTrainer][0] == whole
    assert orders[DROTrainer][1] == whole[6:]


@pytest.mark.filterwarnings("ignore:DRO's penalty does nothing:UserWarning")
@pytest.mark.parametrize("trainer_class", [GRPOTrainer, DROTrainer])
def test_an_epoch_that_a_callback_cuts_short_is_not_repeated(build, trainer_class):
    seen: list[str] = []

    class Cut(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_epoch_stop = state.global_step % 2 == 0

    def watching(prompts, completions, **_):
        seen.append(prompts[0])
        return length_reward(completions)

    settings = {"max_steps": -1, "num_train_epochs": 2, "num_iterations": 1, "per_device_train_batch_size": 4}
    trainer = build(trainer_class, reward_funcs=watching, settings=settings, callbacks=[Cut()])
    trainer.train()
    assert len(seen) == len(set(seen)) == 4


# Continuous batching


def continuous(build, trainer_class, bf16, **kwargs):
    settings = {
        "use_transformers_continuous_batching": True,
        "transformers_continuous_batching_config": {"num_blocks": 64, "page_size": 32, "max_batch_tokens": 256},
        "bf16": bf16,
        "max_steps": 1,
        "per_device_eval_batch_size": 8,
    }
    return build(trainer_class, settings=settings, eval_dataset=prompts(2), **kwargs)


def test_continuous_batching_casts_the_weights_for_good_in_trl(build):
    trainer = continuous(build, GRPOTrainer, bf16=True)
    trainer.train()
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bf16", [False, True])
def test_continuous_batching_generates_and_leaves_the_weights_as_they_are(build, bf16, dtype):
    trainer = continuous(build, DROTrainer, bf16=bf16, model=tiny_model().to(dtype))
    before = {name: parameter.clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {dtype}
    log = trainer.state.log_history[0]
    assert log["completions/mean_length"] > 3
    assert log["reward"] > 0
    assert max((parameter - before[name]).abs().max() for name, parameter in trainer.model.named_parameters()) > 0
    assert "eval_reward" in trainer.evaluate()


def test_continuous_batching_that_fails_ends_the_run_and_says_why(build, monkeypatch):
    def broken(self, *args, **kwargs):
        raise RuntimeError("no memory left for the cache")

    trainer = continuous(build, DROTrainer, bf16=False)
    monkeypatch.setattr(type(trainer.model), "forward", broken)
    with pytest.raises(RuntimeError, match=r"continuous batching failed for 8 of 8 prompts: no memory left .*log"):
        trainer.train()


def test_evaluation_with_continuous_batching_fails_in_trl(build):
    with pytest.raises(AttributeError, match="current_gradient_accumulation_steps"):  # it takes it for training
        continuous(build, GRPOTrainer, bf16=False).evaluate()


def test_evaluation_with_continuous_batching_stays_in_evaluation_mode(build):
    modes = []

    def reward(completions, **_):
        modes.append(trainer.model.training)
        return length_reward(completions)

    trainer = continuous(build, DROTrainer, bf16=False, reward_funcs=reward)
    assert "eval_reward" in trainer.evaluate()
    assert modes == [False]


# Sampling settings in generation_kwargs


def test_a_temperature_in_generation_kwargs_is_not_scored_in_trl(build):
    trainer = build(GRPOTrainer, settings={"generation_kwargs": {"temperature": 0.5}})
    assert trainer.generation_config.temperature == 0.5
    assert trainer.temperature == 1.0


@pytest.mark.filterwarnings("ignore:Moved from generation_kwargs:UserWarning")
def test_a_temperature_in_generation_kwargs_is_scored_as_it_is_sampled(build):
    trainer = build(DROTrainer, settings={"generation_kwargs": {"temperature": 0.5}})
    assert trainer.generation_config.temperature == trainer.temperature == 0.5


# Model cards


def test_trls_card_claims_grpo_and_ours_names_dro(build, tmp_path):
    cards = []
    for trainer_class in (GRPOTrainer, DROTrainer):
        build(trainer_class).create_model_card(model_name="mine")
        cards.append((tmp_path / "run" / "README.md").read_text())
    assert "GRPO" in cards[0]
    assert "2402.03300" in cards[0]
    assert "GRPO" not in cards[1]
    assert "2405.19107" in cards[1]
    assert {"trl", "dro", "trl-dro"} <= set(re.findall(r"^- (\S+)$", cards[1], flags=re.MULTILINE))


# Tokenizers and the output directory


@pytest.mark.parametrize("pad", [None, "<eos>"])
def test_a_tokenizer_without_pad_or_with_pad_as_eos_trains(build, pad):
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = pad
    trainer = build(DROTrainer, tokenizer=tokenizer)
    trainer.train()
    assert tokenizer.pad_token == "<eos>"
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())


def test_an_output_directory_that_cannot_be_written_is_refused_before_training(build, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match=r"output_dir=.*cannot be written"):
        build(DROTrainer, settings={"output_dir": str(tmp_path / "file" / "run")})


def test_a_tracker_that_is_not_installed_is_refused_before_a_model_is_loaded(build, monkeypatch):
    monkeypatch.setattr("trl_dro.checks.get_available_reporting_integrations", lambda: ["tensorboard"])
    with pytest.raises(ValueError, match=r"report_to='wandb'.* it is not installed .*Write `report_to=\['tensorb"):
        build(DROTrainer, model="no/such-model", settings={"report_to": ["wandb", "tensorboard"]})


def test_saved_models_load_with_transformers(build, tmp_path):
    trainer = build(DROTrainer)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    loaded = Qwen3ForCausalLM.from_pretrained(tmp_path / "saved")
    ours = dict(trainer.model.named_parameters())
    assert all(torch.equal(parameter, ours[name]) for name, parameter in loaded.named_parameters())


# Without Triton, the LM head is applied to prompts and padding


def projected_and_asked_for(trainer, monkeypatch) -> tuple[list[int], list[int]]:
    """Positions that the LM head was applied to, and tokens that had to be scored, for each scoring pass."""
    kernel, projected, asked_for = trl.trainer.utils._ChunkedLogProbFunction, [], []

    class Spy:
        @staticmethod
        def apply(hidden, *rest):
            projected.append(len(hidden))
            return kernel.apply(hidden, *rest)

    monkeypatch.setattr(trl.trainer.utils, "_ChunkedLogProbFunction", Spy)
    score = trainer._get_per_token_logps_and_entropies

    def counted(model, input_ids, attention_mask, logits_to_keep, batch_size=None, **kwargs):
        asked_for.append(int(attention_mask[:, -logits_to_keep:].sum()))
        return score(model, input_ids, attention_mask, logits_to_keep, None, **kwargs)  # in one chunk

    trainer._get_per_token_logps_and_entropies = counted
    trainer.train()
    assert trainer.state.global_step == 2
    assert len(projected) == len(asked_for) > 2
    return projected, asked_for


def test_trl_projects_prompts_and_padding_on_a_cpu(build, monkeypatch):
    projected, asked_for = projected_and_asked_for(build(GRPOTrainer, rollout_func=scripted), monkeypatch)
    assert sum(projected) > 2 * sum(asked_for)


def test_on_a_cpu_only_what_is_asked_for_is_projected(build, monkeypatch):
    projected, asked_for = projected_and_asked_for(build(DROTrainer, rollout_func=scripted), monkeypatch)
    assert projected == asked_for
