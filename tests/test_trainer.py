import math
import warnings

import pytest
import torch
from transformers import Qwen3ForCausalLM
from trl import GRPOConfig

from trl_dro import DROTrainer

from .tiny import length_reward, prompts, tiny_model, tiny_tokenizer


def make_trainer(config, *, model=None, reward_funcs=length_reward, **kwargs) -> DROTrainer:
    return DROTrainer(
        model=model if model is not None else tiny_model(),
        reward_funcs=reward_funcs,
        args=config,
        train_dataset=kwargs.pop("train_dataset", prompts()),
        processing_class=tiny_tokenizer(),
        **kwargs,
    )


def weights(trainer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def largest_difference(first: dict, second: dict) -> float:
    return max((first[name] - second[name]).abs().max().item() for name in first)


def scripted_rollout(prompts, trainer) -> dict:
    """Completions that depend only on the prompt and the place in its group, of ragged lengths."""
    ids, logprobs = [], []
    first = trainer.accelerator.process_index * len(prompts)
    for index, prompt in enumerate(prompts, first):
        place = index % trainer.num_generations
        length = 1 + (sum(map(ord, prompt)) + 3 * place) % 6
        ids.append([4 + (ord(prompt[0]) + 5 * place + token) % 26 for token in range(length)])
        logprobs.append([-3.0 - 0.1 * (place + token % 2) for token in range(length)])
    prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": logprobs}


@pytest.fixture
def quiet_rollouts(monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


def record_inputs(trainer) -> list[dict]:
    seen, compute_loss = [], trainer.compute_loss

    def recording(model, inputs, *args, **kwargs):
        seen.append(inputs)
        return compute_loss(model, inputs, *args, **kwargs)

    trainer.compute_loss = recording
    return seen


def test_a_run_reports_finite_metrics_of_every_kind(make_config):
    trainer = make_trainer(make_config())
    trainer.train()
    second = trainer.state.log_history[1]  # the second pass over the first generated batch
    expected = {"policy_loss", "entropy", "dro/past_optimum", "dro/penalty_share", "dro/anchor_staleness"}
    expected |= {f"dro/log_ratio_{name}" for name in ("mean", "abs", "p01", "p50", "p99", "max")}
    expected |= {f"dro/kl_{name}" for name in ("k1", "k2", "k3")}
    assert expected <= second.keys()
    assert all(math.isfinite(value) for value in second.values() if isinstance(value, float))
    assert second["dro/kl_k2"] > 0
    assert second["dro/anchor_staleness"] == 1.0
    assert not any(key.startswith("_") or "penalty_abs" in key for key in second)


def test_the_first_pass_over_a_batch_is_at_its_anchor(make_config):
    trainer = make_trainer(make_config())
    trainer.train()
    first = trainer.state.log_history[0]
    assert first["dro/anchor_staleness"] == 0.0
    assert first["dro/log_ratio_max"] == pytest.approx(0.0, abs=1e-6)
    assert first["dro/penalty_share"] == pytest.approx(0.0, abs=1e-6)


def test_an_aligned_run_is_the_same_for_any_dro_beta(make_config):
    """One optimizer step on each generated batch: the log-ratio is 0, so the penalty cannot act."""
    runs, curves = [], []
    for beta in (0.01, 100.0):
        with pytest.warns(UserWarning, match="penalty does nothing"):
            config = make_config(dro_beta=beta, num_iterations=1)
        trainer = make_trainer(config)
        trainer.train()
        runs.append(weights(trainer))
        curves.append([log["reward"] for log in trainer.state.log_history if "reward" in log])
    assert largest_difference(*runs) == 0.0
    assert curves[0] == curves[1]


def test_the_penalty_acts_as_soon_as_a_batch_is_used_twice(make_config):
    runs = []
    for beta in (0.01, 100.0):
        trainer = make_trainer(make_config(dro_beta=beta))
        trainer.train()
        runs.append(weights(trainer))
    assert largest_difference(*runs) > 1e-4


SGD = {"optim": "sgd", "learning_rate": 0.5, "max_steps": 3, "max_grad_norm": 1e6}
CUTS = {
    "one micro-batch": {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1},
    "four micro-batches": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4},
    "sixteen micro-batches": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 16},
    "two generated batches": {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "steps_per_generation": 2,
    },
    "four generated batches": {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "steps_per_generation": 1,
    },
}


def train_scripted(make_config, **overrides):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="DRO's penalty does nothing")
        warnings.filterwarnings("ignore", message="loss_agg_mode='token-sum'")
        config = make_config(**{**SGD, "num_iterations": 1, **overrides})
    trainer = make_trainer(config, model=tiny_model().double(), rollout_func=scripted_rollout)
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    "mode", ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
)
def test_a_window_gives_the_same_weights_however_it_is_cut(make_config, quiet_rollouts, mode):
    rate = {"token-sum": 0.005, "seq-mean-token-sum": 0.1}.get(mode, 0.5)
    trainers = {
        cut: train_scripted(make_config, loss_agg_mode=mode, learning_rate=rate, **geometry)
        for cut, geometry in CUTS.items()
    }
    whole = trainers.pop("one micro-batch")
    untrained = {name: parameter.detach() for name, parameter in tiny_model().double().named_parameters()}
    assert largest_difference(weights(whole), untrained) > 1e-3
    for cut, trainer in trainers.items():
        # Qwen3's norms and rotary angles are float32 even in a float64 model, hence not 1e-10.
        assert largest_difference(weights(whole), weights(trainer)) < 1e-7, cut
        for logged, expected in zip(trainer.state.log_history[:3], whole.state.log_history[:3], strict=True):
            assert logged["policy_loss"] == pytest.approx(expected["policy_loss"], rel=1e-5, abs=1e-6), cut
            assert logged["entropy"] == pytest.approx(expected["entropy"], rel=1e-5), cut


def test_the_counts_of_a_window_are_those_of_all_its_micro_batches(make_config, quiet_rollouts):
    with pytest.warns(UserWarning, match="penalty does nothing"):
        config = make_config(
            per_device_train_batch_size=4, gradient_accumulation_steps=4, steps_per_generation=2, num_iterations=1
        )
    trainer = make_trainer(config, rollout_func=scripted_rollout)
    seen = record_inputs(trainer)
    trainer.train()
    assert len(seen) == 16
    for start in range(0, 16, 4):
        window = seen[start : start + 4]
        tokens = sum(int(inputs["completion_mask"].sum()) for inputs in window)
        assert [inputs["window_num_tokens"].item() for inputs in window] == [tokens] * 4
        assert [inputs["window_num_sequences"].item() for inputs in window] == [16] * 4


def test_the_short_last_window_of_an_epoch_counts_only_what_it_has(make_config, quiet_rollouts):
    """3 generated batches of one micro-step, in windows of two: the second window holds one."""
    with pytest.warns(UserWarning, match="penalty does nothing"):
        config = make_config(
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            steps_per_generation=1,
            num_iterations=1,
            max_steps=-1,
            num_train_epochs=2,
        )
    trainer = make_trainer(config, rollout_func=scripted_rollout, train_dataset=prompts(3))
    seen = record_inputs(trainer)
    trainer.train()
    assert [inputs["window_num_sequences"].item() for inputs in seen] == [8, 8, 4, 8, 8, 4]
    for inputs in (seen[2], seen[5]):
        assert inputs["window_num_tokens"].item() == inputs["completion_mask"].sum().item()


@pytest.mark.parametrize("passes", [1, 3])
def test_a_window_across_blocks_generates_each_block_once(make_config, quiet_rollouts, passes):
    """Windows of two micro-steps over blocks of one slot and three passes straddle block boundaries."""
    calls = []

    def counting_rollout(prompts, trainer):
        calls.append(trainer.state.global_step)
        return scripted_rollout(prompts, trainer)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="DRO's penalty does nothing")
        config = make_config(
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            steps_per_generation=1,
            num_iterations=passes,
            max_steps=6,
        )
    trainer = make_trainer(config, rollout_func=counting_rollout)
    seen = record_inputs(trainer)
    trainer.train()
    if passes == 1:
        assert calls == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    else:
        assert calls == [0, 1, 3, 4]
        assert [inputs["window_born"] for inputs in seen] == [0, 0, 0, 1, 1, 1, 3, 3, 3, 4, 4, 4]
    staleness = [log["dro/anchor_staleness"] for log in trainer.state.log_history[:6]]
    assert max(staleness) <= config.batch_plan().max_staleness


def test_a_fully_truncated_batch_is_a_zero_step(make_config, quiet_rollouts):
    """No scripted completion ends with eos, so `mask_truncated_completions` leaves nothing to train on."""
    trainer = make_trainer(make_config(mask_truncated_completions=True), rollout_func=scripted_rollout)
    before = weights(trainer)
    trainer.train()
    assert largest_difference(before, weights(trainer)) == 0.0
    assert trainer.state.log_history[0]["policy_loss"] == 0.0


def test_the_reference_anchor_makes_beta_act_on_policy_without_a_kl_term(make_config, saved_model):
    runs = []
    for beta in (0.01, 100.0):
        trainer = make_trainer(
            make_config(anchor_policy="reference", dro_beta=beta, num_iterations=1), model=saved_model()
        )
        assert trainer.beta == trainer.args.beta == 0.0
        assert trainer.ref_model is not None
        trainer.train()
        runs.append(weights(trainer))
        logs = trainer.state.log_history
        assert "kl" not in logs[1]
        assert [log["dro/anchor_staleness"] for log in logs[:4]] == [0.0, 1.0, 2.0, 3.0]
        assert logs[0]["dro/log_ratio_max"] == pytest.approx(0.0, abs=1e-5)
        assert logs[1]["dro/kl_k2"] > 0.0
    assert largest_difference(*runs) > 1e-4


@pytest.fixture
def saved_model(tmp_path):
    """TRL loads the reference model from the policy's path, so the policy must have one."""
    tiny_model().save_pretrained(tmp_path / "model")
    return lambda: Qwen3ForCausalLM.from_pretrained(tmp_path / "model")


def test_the_sampling_anchor_is_the_engines_log_probs_and_costs_no_scoring_pass(make_config, quiet_rollouts):
    trainer = make_trainer(make_config(anchor_policy="sampling"), rollout_func=scripted_rollout)
    passes, score = [], trainer._get_per_token_logps_and_entropies
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: passes.append(1) or score(*args, **kwargs)
    seen = record_inputs(trainer)
    trainer.train()
    assert len(passes) == trainer.state.global_step == 4
    assert "old_per_token_logps" not in seen[0]
    assert trainer.state.log_history[0]["dro/log_ratio_abs"] > 0.0


def test_the_sampling_anchor_is_refused_without_an_engine_that_reports_log_probs(make_config):
    with pytest.raises(ValueError, match=r"anchor_policy='sampling'.*use_vllm=True or a rollout_func"):
        make_trainer(make_config(anchor_policy="sampling"))


def test_other_configurations_are_refused_with_the_line_to_write(tmp_path):
    trls = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, activation_checkpointing=False)
    for args, message in (
        (None, r"dro_beta is not set"),
        (trls, r"from_grpo_config\(args, dro_beta=0.5\)"),
    ):
        with pytest.raises(ValueError, match=message):
            DROTrainer(model="no/such-model", reward_funcs=length_reward, args=args, train_dataset=prompts())


def test_a_rollout_without_log_probs_is_refused_where_they_are_the_anchor(make_config, quiet_rollouts):
    def silent_engine(prompts, trainer):
        return {**scripted_rollout(prompts, trainer), "logprobs": None}

    trainer = make_trainer(make_config(anchor_policy="sampling"), rollout_func=silent_engine)
    with pytest.raises(ValueError, match="anchor_policy='sampling' is refused: the rollout came without log-probs"):
        trainer.train()


def test_a_reference_is_refused_for_a_model_that_has_no_place_to_be_loaded_from(make_config):
    for settings, field in (
        ({"beta": 0.1}, "beta=0.1"),
        ({"anchor_policy": "reference"}, "anchor_policy='reference'"),
    ):
        with pytest.raises(ValueError, match=f"{field} is refused.*save_pretrained"):
            make_trainer(make_config(**settings))


def test_a_model_given_by_its_path_brings_its_reference_along(make_config, saved_model, tmp_path):
    trainer = make_trainer(make_config(anchor_policy="reference"), model=str(tmp_path / "model"))
    trainer.train()
    assert trainer.state.log_history[1]["dro/kl_k2"] > 0.0


def test_syncing_a_reference_that_an_adapter_does_not_have_is_refused(make_config):
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match=r"sync_ref_model=True is refused.*sync_ref_model=False"):
        make_trainer(make_config(anchor_policy="reference", sync_ref_model=True), peft_config=adapter)


def test_training_again_starts_with_rollouts_of_its_own(make_config):
    trainer = make_trainer(make_config(max_steps=3))
    trainer.train()
    trainer.train()
    again = trainer.state.log_history[:3]
    # The first run ended between the two passes over a batch; the second starts with both passes over a new one.
    assert [log["dro/anchor_staleness"] for log in again] == [0.0, 1.0, 0.0]
    assert ["reward" in log for log in again] == [True, False, True]


@pytest.mark.filterwarnings("ignore:The stream ended:UserWarning")
def test_a_stream_that_ends_inside_a_window_leaks_no_gradient_into_the_next(make_config, quiet_rollouts):
    """3 generated batches of one micro-step in windows of two: the third has no optimizer step to belong to."""
    with pytest.warns(UserWarning, match="penalty does nothing"):
        config = make_config(
            per_device_train_batch_size=4, gradient_accumulation_steps=2, steps_per_generation=1, num_iterations=1
        )
    trainer = make_trainer(
        config, rollout_func=scripted_rollout, train_dataset=prompts(3).to_iterable_dataset(), model=tiny_model()
    )
    seen = record_inputs(trainer)
    trainer.train()
    assert [inputs["window_num_sequences"].item() for inputs in seen] == [8] * 8


def test_a_loss_can_be_computed_by_hand_before_training(make_config):
    trainer = make_trainer(make_config())
    trainer.model.train()
    inputs = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    bare = {name: value for name, value in inputs.items() if not name.startswith("window_")}
    loss = trainer.compute_loss(trainer.model, bare)
    assert loss.item() == pytest.approx(trainer.compute_loss(trainer.model, inputs).item(), rel=1e-6)


def test_an_objective_that_returns_something_else_is_told_what_to_return(make_config, monkeypatch, tmp_path):
    (tmp_path / "bare_objective.py").write_text(
        "class Bare:\n    def __call__(self, inputs):\n        return -inputs.advantages * inputs.ratio\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    trainer = make_trainer(make_config(policy_loss="bare_objective.Bare", dro_beta=None))
    with pytest.raises(TypeError, match=r"returned a Tensor, it must return PolicyLossOutput"):
        trainer.train()


def test_evaluation_reports_under_its_own_prefix_and_scores_no_old_policy(make_config):
    trainer = make_trainer(make_config(num_generations_eval=1, per_device_eval_batch_size=8), eval_dataset=prompts(8))
    passes, score = [], trainer._get_per_token_logps_and_entropies
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: passes.append(1) or score(*args, **kwargs)
    logs = trainer.evaluate()
    assert len(passes) == 1
    assert {"eval_reward", "eval_policy_loss", "eval_entropy", "eval_dro/kl_k2"} <= logs.keys() | set(
        trainer.state.log_history[-1]
    )
    trainer.train()
    assert not any(key.startswith("eval_") for key in trainer.state.log_history[-2])


def test_disable_dropout_reaches_dropout_that_attention_holds_as_a_number(make_config):
    trainer = make_trainer(make_config(disable_dropout=True), model=tiny_model(attention_dropout=0.5))
    trainer.train()
    assert trainer.state.log_history[0]["dro/log_ratio_max"] == pytest.approx(0.0, abs=1e-6)


def test_a_user_objective_outside_the_package_trains_by_its_dotted_path(make_config, tmp_path, monkeypatch):
    (tmp_path / "my_objectives.py").write_text(
        "from dataclasses import dataclass\n"
        "from trl_dro import PolicyLossInputs, PolicyLossOutput\n"
        "\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Squashed:\n"
        "    width: float = 1.0\n"
        "    def __call__(self, inputs: PolicyLossInputs) -> PolicyLossOutput:\n"
        "        pull = (inputs.log_ratio / self.width).tanh() * self.width\n"
        "        return PolicyLossOutput(-inputs.advantages * pull, {'squashed/pull': pull.detach().abs()})\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    trainer = make_trainer(
        make_config(policy_loss="my_objectives.Squashed", policy_loss_kwargs={"width": 0.5}, dro_beta=None)
    )
    before = weights(trainer)
    trainer.train()
    assert type(trainer.policy_loss).__name__ == "Squashed"
    assert trainer.policy_loss.width == 0.5
    assert largest_difference(before, weights(trainer)) > 0.0
    assert trainer.state.log_history[1]["squashed/pull"] > 0.0


def test_adapters_train_and_the_base_stays_as_it_was(make_config):
    peft = pytest.importorskip("peft")
    base = tiny_model()
    before = {name: parameter.detach().clone() for name, parameter in base.named_parameters()}
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = make_trainer(make_config(anchor_policy="reference"), model=base, peft_config=adapter)
    trainer.train()
    assert trainer.ref_model is None
    assert trainer.state.log_history[-2]["dro/kl_k2"] > 0.0
    after = {
        name.replace("base_model.model.", "").replace(".base_layer", ""): p for name, p in weights(trainer).items()
    }
    assert max((after[name] - before[name]).abs().max().item() for name in before) == 0.0


@pytest.mark.parametrize(
    "options",
    [
        {"beta": 0.1},
        {"beta": 0.1, "use_bias_correction_kl": False},
        {"top_entropy_quantile": 0.5},
        {"entropy_coef": 0.1},
        {"use_adaptive_entropy": True, "entropy_target": 10.0},
        {"off_policy_mask_threshold": 0.001},
        {"mask_truncated_completions": True},
        {"reward_weights": [2.0]},
        {"scale_rewards": "batch"},
        {"multi_objective_aggregation": "normalize_then_sum"},
        {"pad_to_multiple_of": 4},
        {"dro_level": "sequence", "dro_beta": 0.1},
        {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2},
    ],
    ids=str,
)
def test_every_inherited_option_changes_the_run_and_keeps_it_finite(make_config, saved_model, options):
    trainer = make_trainer(make_config(**options), model=saved_model())
    trainer.train()
    plain = make_trainer(make_config(), model=saved_model())
    plain.train()
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
    if "pad_to_multiple_of" not in options:
        assert largest_difference(weights(trainer), weights(plain)) > 0.0


@pytest.mark.parametrize(
    ("target", "expected"),
    # The entropy is about 3.5: twice that would lie above the target of 5, and half of it below that of 2.5.
    [(10.0, [0.12, 0.14, 0.15, 0.15]), (5.0, [0.12, 0.14, 0.15, 0.15]), (2.5, [0.08, 0.06, 0.04, 0.02])],
)
def test_the_adaptive_entropy_coefficient_moves_by_delta_once_each_optimizer_step(make_config, target, expected):
    config = make_config(
        use_adaptive_entropy=True,
        entropy_target=target,
        entropy_coef=0.1,
        entropy_coef_delta=0.02,
        entropy_coef_max=0.15,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
    )
    trainer = make_trainer(config)
    trainer.train()
    logs = trainer.state.log_history[:4]
    assert [log["entropy_coef"] for log in logs] == pytest.approx(expected)
    assert all(2.5 < log["entropy"] < 5.0 < 2 * log["entropy"] for log in logs)


@pytest.mark.parametrize("name", ["ppo_clip", "cispo", "gspo", "sapo", "reinforce", "kl_cov", "clip_cov", "gmpo"])
def test_every_kind_of_objective_trains(make_config, name):
    agg = "seq-mean-token-mean" if name in ("gspo", "gmpo", "sapo") else "token-mean"
    trainer = make_trainer(make_config(policy_loss=name, dro_beta=None, loss_agg_mode=agg))
    before = weights(trainer)
    trainer.train()
    assert largest_difference(before, weights(trainer)) > 0.0
    assert math.isfinite(trainer.state.log_history[1]["policy_loss"])
    if name == "ppo_clip":
        assert {"clip_ratio/low_mean", "clip_ratio/high_max"} <= trainer.state.log_history[1].keys()


def test_the_model_card_names_dro_and_cites_its_paper(make_config, tmp_path):
    trainer = make_trainer(make_config())
    trainer.create_model_card(model_name="mine")
    card = (tmp_path / "run" / "README.md").read_text()
    assert "2405.19107" in card
    assert "dro" in card
    assert "GRPO" not in card


def test_the_bias_corrected_kl_uses_the_engines_log_probs_when_they_are_the_anchor(
    make_config, quiet_rollouts, saved_model
):
    """The policy moves away from what the engine sampled with, so correcting or not must make a difference."""
    runs = []
    for corrected in (True, False):
        config = make_config(anchor_policy="sampling", beta=1.0, use_bias_correction_kl=corrected)
        trainer = make_trainer(config, model=saved_model(), rollout_func=scripted_rollout)
        seen, loss = [], trainer._reference_kl
        trainer._reference_kl = lambda against_old, ref, loss=loss, seen=seen: (
            seen.append(against_old) or loss(against_old, ref)
        )
        trainer.train()
        assert all(inputs.log_ratio[inputs.mask].abs().min() > 0 for inputs in seen)
        runs.append(weights(trainer))
    assert largest_difference(*runs) > 1e-4


def test_tokens_that_the_engine_could_not_score_count_as_unchanged(make_config, quiet_rollouts):
    def broken_engine(prompts, trainer):
        output = scripted_rollout(prompts, trainer)
        output["logprobs"] = [[math.nan for _ in row] for row in output["logprobs"]]
        return output

    trainer = make_trainer(make_config(anchor_policy="sampling"), rollout_func=broken_engine)
    trainer.train()
    assert trainer.state.log_history[1]["dro/log_ratio_max"] == 0.0
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
