"""Rollouts that are not from the current policy, end to end: anchors, correction, baselines, adaptive beta."""

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

from trl_dro.advantages import group_advantages
from trl_dro.beta_control import AdaptiveBeta
from trl_dro.rollout_correction import STATISTICS, importance_weights, rejection_mask

from .test_trainer import (  # noqa: F401  # fixtures
    largest_difference,
    make_trainer,
    quiet_rollouts,
    record_inputs,
    scripted_rollout,
    weights,
)
from .tiny import tiny_model


pytestmark = pytest.mark.usefixtures("quiet_rollouts")


def engine(noise: float = 0.1, poison=None):
    """An inference engine: samples from the policy, and reports log-probs that are off by `noise`.

    `poison(row, position)` may give another log-prob to report.
    """

    def rollout(prompts: list[str], trainer) -> dict:
        tokens = trainer.processing_class(prompts, padding=True, return_tensors="pt")
        with torch.no_grad():
            output = trainer.model.generate(
                **tokens,
                max_new_tokens=trainer.max_completion_length,
                do_sample=True,
                return_dict_in_generate=True,
                output_logits=True,
            )
        completions = output.sequences[:, tokens["input_ids"].shape[1] :]
        logps = torch.stack(output.logits, dim=1).log_softmax(dim=-1)
        logps = logps.gather(2, completions.unsqueeze(2)).squeeze(2)
        logps = logps - noise * torch.rand_like(logps)
        ids, reported = [], []
        for row, (completion, values) in enumerate(zip(completions.tolist(), logps.tolist(), strict=True)):
            length = completion.index(2) + 1 if 2 in completion else len(completion)
            ids.append(completion[:length])
            values = values[:length]
            if poison is not None:
                values = [poison(row, place, value) for place, value in enumerate(values)]
            reported.append(values)
        prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": reported}

    return rollout


@pytest.fixture
def model(tmp_path):
    """A model with a path, as a reference model needs one."""
    tiny_model().save_pretrained(tmp_path / "model")
    return Qwen3ForCausalLM.from_pretrained(tmp_path / "model")


def check_finite(trainer) -> None:
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
    for log in trainer.state.log_history:
        assert all(math.isfinite(value) for value in log.values() if isinstance(value, float)), log


CORRECTIONS = {
    "none": {},
    "token weights": {"rollout_is": "token"},
    "sequence weights, two-sided": {"rollout_is": "sequence", "rollout_is_threshold_lower": 0.5},
    "normalised": {"rollout_is": "token", "rollout_is_batch_normalize": True},
    "preset": {"rollout_correction_preset": "decoupled_k3_rs_token_tis"},
    "every statistic": {
        "rollout_rs": list(STATISTICS),
        "rollout_rs_threshold": [4.0 if name.endswith("k1") else 2.0 for name in STATISTICS],
        "rollout_rs_threshold_lower": [0.25 if name.endswith("k1") else None for name in STATISTICS],
    },
}


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("anchor", ["old", "sampling", "reference"])
def test_twenty_steps_with_every_anchor_and_correction(make_config, model, anchor, correction, level):
    settings = CORRECTIONS[correction]
    if anchor == "sampling" and settings:
        with pytest.raises(ValueError, match="would count the engine's mismatch twice"):
            make_config(anchor_policy=anchor, **settings)
        return
    config = make_config(anchor_policy=anchor, dro_level=level, max_steps=20, **settings)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = make_trainer(config, model=model, rollout_func=engine())
    trainer.train()
    assert trainer.state.global_step == 20
    assert largest_difference(weights(trainer), before) > 1e-3
    check_finite(trainer)
    names = set().union(*trainer.state.log_history)
    measured = anchor == "old" or bool(settings)  # else the trainer scores nothing that it could compare
    assert "rollout_corr/unscored_fraction" in names
    assert ({"rollout_corr/kl", "rollout_corr/chi2_token", "rollout_corr/ppl_ratio"} <= names) == measured
    assert ("rollout_corr/rollout_is_eff_sample_size" in names) == (
        "rollout_is" in str(settings) or "tis" in str(settings)
    )
    assert ("rollout_corr/rollout_rs_masked_fraction" in names) == (config.rollout_rs is not None)


def test_the_mismatch_is_that_of_the_engine(make_config):
    trainer = make_trainer(make_config(rollout_is="token"), rollout_func=engine(noise=0.2))
    trainer.train()
    # the engine's log-probs are lower by 0.1 on average
    generated = [log for log in trainer.state.log_history if "rollout_corr/kl" in log]
    assert len(generated) == 2
    for log in generated:
        assert log["rollout_corr/kl"] == pytest.approx(-0.1, abs=0.03)
        assert log["rollout_corr/rollout_is_mean"] == pytest.approx(math.exp(0.1), abs=0.04)
        assert log["rollout_corr/unscored_fraction"] == 0.0


@pytest.mark.parametrize("iterations", [1, 2])
@pytest.mark.filterwarnings("ignore:DRO's penalty does nothing")
def test_weights_and_rejections_are_those_of_old_against_sampling(make_config, iterations):
    config = make_config(
        rollout_is="token",
        rollout_is_threshold=1.05,
        rollout_rs=["token_k2"],
        rollout_rs_threshold=[0.001],
        num_iterations=iterations,
        per_device_train_batch_size=4,
        steps_per_generation=2,
        gradient_accumulation_steps=2,
    )
    trainer = make_trainer(config, rollout_func=engine())
    seen = record_inputs(trainer)
    trainer.train()
    assert seen
    for inputs in seen:
        log_ratio = inputs["old_per_token_logps"] - inputs["sampling_per_token_logps"]
        mask = inputs["completion_mask"]
        expected, _ = importance_weights(log_ratio, mask, level="token", threshold=1.05)
        torch.testing.assert_close(inputs["rollout_is_weights"], expected)
        kept, _ = rejection_mask(log_ratio, mask, statistic="token_k2", threshold=0.001)
        assert torch.equal(inputs["rollout_rs_mask"], kept)
        assert 0 < kept.sum() < mask.sum()
    # the counts that normalise a window are of what is still trained
    window = seen[:2]
    assert int(seen[0]["window_num_tokens"]) == sum(int(inputs["rollout_rs_mask"].sum()) for inputs in window)


def test_weights_multiply_both_terms_of_dro(make_config):
    trainer = make_trainer(make_config(rollout_is="token"), rollout_func=engine())
    trainer.train()
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    batch["old_per_token_logps"] = batch["old_per_token_logps"] - 0.7  # so that the penalty acts
    plain = {**batch, "rollout_is_weights": torch.ones_like(batch["rollout_is_weights"])}
    doubled = {**batch, "rollout_is_weights": torch.full_like(batch["rollout_is_weights"], 2.0)}
    losses = [trainer.compute_loss(trainer.model, inputs).item() for inputs in (plain, doubled)]
    assert losses[1] == pytest.approx(2 * losses[0])
    assert losses[0] != 0.0


def test_normalised_weights_have_mean_one_over_the_generated_batch(make_config):
    config = make_config(
        rollout_is="token", rollout_is_batch_normalize=True, per_device_train_batch_size=4, steps_per_generation=4
    )
    trainer = make_trainer(config, rollout_func=engine(noise=1.0))
    seen = record_inputs(trainer)
    trainer.train()
    block = seen[:4]
    values = torch.cat([inputs["rollout_is_weights"][inputs["completion_mask"].bool()] for inputs in block])
    assert values.mean().item() == pytest.approx(1.0, abs=1e-5)
    first = block[0]["rollout_is_weights"][block[0]["completion_mask"].bool()]
    assert abs(first.mean().item() - 1.0) > 1e-4


def test_correction_needs_an_engine_that_reports_log_probs(make_config):
    for settings, field in (
        ({"rollout_is": "token"}, "rollout_is='token'"),
        ({"rollout_rs": ["token_k2"], "rollout_rs_threshold": [0.1]}, r"rollout_rs=\['token_k2'\]"),
    ):
        with pytest.raises(ValueError, match=f"{field} is refused: no engine here reports log-probs"):
            make_trainer(make_config(**settings))

        def silent(prompts, trainer):
            return {**scripted_rollout(prompts, trainer), "logprobs": None}

        trainer = make_trainer(make_config(**settings), rollout_func=silent)
        with pytest.raises(ValueError, match=f"{field} is refused: the rollout came without log-probs"):
            trainer.train()


# A poisoned engine

POISON = {
    "nan": lambda row, place, value: math.nan if place % 2 else value,
    "none": lambda row, place, value: None if place % 2 else value,
    "-inf": lambda row, place, value: -math.inf if place % 2 else value,
    "inf": lambda row, place, value: math.inf if place % 2 else value,
    "1e4": lambda row, place, value: 1e4 if place % 2 else value,
    "-1e4": lambda row, place, value: -1e4 if place % 2 else value,
    "lowest": lambda row, place, value: torch.finfo(torch.float32).min if place % 2 else value,
    "all nan": lambda row, place, value: math.nan,
}


@pytest.mark.parametrize("settings", [{"rollout_is": "sequence"}, {"anchor_policy": "sampling"}], ids=str)
@pytest.mark.parametrize("poison", POISON)
def test_a_poisoned_engine_leaves_the_weights_finite(make_config, poison, settings):
    trainer = make_trainer(make_config(**settings), rollout_func=engine(poison=POISON[poison]))
    if poison in ("inf", "1e4", "-1e4", "lowest"):
        with pytest.warns(UserWarning, match="no log-prob"):
            trainer.train()
    else:
        trainer.train()
    assert trainer.state.global_step == 4
    check_finite(trainer)
    share = trainer.state.log_history[0]["rollout_corr/unscored_fraction"]
    assert share == 1.0 if poison == "all nan" else 0.2 < share < 0.6


def test_single_positive_log_probs_do_not_end_a_run(make_config):
    """Where all lie between 0 and 1 they are probabilities; a few are an engine's hiccup."""
    odd = engine(poison=lambda row, place, value: 0.5 if place == 1 else value)
    trainer = make_trainer(make_config(rollout_is="token"), rollout_func=odd)
    with pytest.warns(UserWarning, match="no log-prob"):
        trainer.train()
    check_finite(trainer)
    assert 0.0 < trainer.state.log_history[0]["rollout_corr/unscored_fraction"] < 0.5


def test_unscored_tokens_have_weight_one(make_config):
    trainer = make_trainer(make_config(rollout_is="token"), rollout_func=engine(poison=POISON["nan"]))
    seen = record_inputs(trainer)
    trainer.train()
    unscored = seen[0]["sampling_per_token_logps"].isnan() & seen[0]["completion_mask"].bool()
    assert unscored.any()
    assert (seen[0]["rollout_is_weights"][unscored] == 1.0).all()


def test_a_window_with_everything_rejected_is_a_zero_step(make_config):
    config = make_config(rollout_rs=["seq_max_k2"], rollout_rs_threshold=[1e-9], optim="sgd", learning_rate=0.5)
    trainer = make_trainer(config, rollout_func=engine(noise=1.0))
    before = weights(trainer)
    trainer.train()
    assert trainer.state.global_step == 4
    assert largest_difference(before, weights(trainer)) == 0.0
    check_finite(trainer)
    log = trainer.state.log_history[0]
    assert log["rollout_corr/rollout_rs_masked_fraction"] == log["rollout_corr/rollout_rs_seq_masked_fraction"] == 1.0
    assert log["loss"] == log["grad_norm"] == 0.0


# Anchors


def scored_without_gradient(trainer) -> list[str]:
    """The policies that are scored while no gradient is kept, by name."""
    scored, score = [], trainer._get_per_token_logps_and_entropies

    def noting(model, *args, **kwargs):
        if not torch.is_grad_enabled():
            scored.append("reference" if model is trainer.ref_model else "old")
        return score(model, *args, **kwargs)

    trainer._get_per_token_logps_and_entropies = noting
    return scored


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"anchor_policy": "old"}, ["old"]),
        ({"anchor_policy": "sampling"}, []),
        ({"anchor_policy": "reference"}, ["reference"]),
        ({"anchor_policy": "reference", "rollout_is": "token"}, ["old", "reference"]),
        ({"anchor_policy": "reference", "off_policy_mask_threshold": 0.5}, ["old", "reference"]),
        ({"anchor_policy": "reference", "beta": 0.1, "use_bias_correction_kl": False}, ["reference"]),
        ({"anchor_policy": "reference", "beta": 0.1, "use_bias_correction_kl": True}, ["old", "reference"]),
        ({"anchor_policy": "sampling", "beta": 0.1}, ["reference"]),
    ],
    ids=str,
)
def test_only_policies_that_something_reads_are_scored(make_config, model, settings, expected):
    trainer = make_trainer(make_config(**settings), model=model, rollout_func=engine())
    scored = scored_without_gradient(trainer)
    trainer.train()
    assert sorted(scored) == sorted(expected * 2)  # two generated batches


@pytest.mark.parametrize("settings", [{"anchor_policy": "sampling"}, {"anchor_policy": "reference"}], ids=str)
def test_a_rollout_function_sees_the_configuration_as_it_was_written(make_config, model, settings):
    seen = []

    def rollout(prompts, trainer):
        seen.append((trainer.args.gradient_accumulation_steps, trainer.args.steps_per_generation, trainer.beta))
        return engine()(prompts, trainer)

    make_trainer(make_config(**settings), model=model, rollout_func=rollout).train()
    assert seen == [(1, 1, 0.0)] * 2


@pytest.mark.parametrize(("every", "ages"), [(1, [0, 1, 2, 3]), (2, [0, 1, 2, 3]), (3, [0, 1, 2, 3, 1, 2, 3, 4])])
def test_a_reference_that_follows_is_as_old_as_its_last_sync(make_config, model, every, ages):
    config = make_config(
        anchor_policy="reference",
        sync_ref_model=True,
        ref_model_sync_steps=every,
        ref_model_mixup_alpha=1.0,
        num_iterations=4,
        max_steps=8,
    )
    trainer = make_trainer(config, model=model)
    trainer.train()
    logged = [log["dro/anchor_staleness"] for log in trainer.state.log_history if "dro/anchor_staleness" in log]
    assert logged == (ages * 2)[:8]


# Baselines


@pytest.mark.parametrize("scale", ["none", "group", "batch"])
@pytest.mark.parametrize("settings", [("leave-one-out", None), ("soft", 0.2), ("soft", None)], ids=str)
@pytest.mark.filterwarnings("ignore:.*scale_rewards")
def test_advantages_are_those_of_the_baseline(make_config, settings, scale):
    baseline, temperature = settings
    rewards: list[float | None] = []

    def reward(completions, **_):
        values = [None if len(set(text)) == 5 else len(set(text)) / 8 for text in completions]
        rewards.extend(math.nan if value is None else value for value in values)
        return values

    config = make_config(
        advantage_baseline=baseline,
        advantage_baseline_temperature=temperature,
        scale_rewards=scale,
        shuffle_dataset=False,
        max_steps=2,
    )
    trainer = make_trainer(config, reward_funcs=reward, rollout_func=scripted_rollout)
    batches, generate = [], trainer._generate_and_score_completions

    def recording(inputs):
        batches.append(generate(inputs))
        return batches[-1]

    trainer._generate_and_score_completions = recording
    trainer.train()
    (batch,) = batches
    given = torch.tensor(rewards)
    assert given.isnan().any()
    if baseline == "soft" and temperature is None:
        temperature = 0.5 / (batch["completion_mask"].sum() / 8).item()  # dro_beta over the mean length
    expected = group_advantages(given, 4, baseline=baseline, temperature=temperature)
    if scale != "none":
        spread = [torch.tensor([v for v in group if not math.isnan(v)]).std() for group in (given[:4], given[4:])]
        spread = torch.stack(spread).repeat_interleave(4) if scale == "group" else given[~given.isnan()].std()
        expected = expected / (spread + 1e-4)
    torch.testing.assert_close(batch["advantages"], expected)
    assert list(trainer._logs["advantages"]) == pytest.approx(expected.tolist())


def test_baselines_hold_in_evaluation(make_config):
    config = make_config(advantage_baseline="soft", num_generations_eval=1, per_device_eval_batch_size=4)
    trainer = make_trainer(config, eval_dataset=None)
    metrics = trainer.evaluate(trainer.train_dataset.select(range(6)))
    assert math.isfinite(metrics["eval_loss"])


# Adaptive beta


def test_beta_follows_the_distance(make_config):
    betas = {}
    for target in (1e-6, 10.0):
        trainer = make_trainer(make_config(dro_target_kl=target, max_steps=12, num_iterations=4))
        trainer.train()
        logged = [log["dro/beta"] for log in trainer.state.log_history if "dro/beta" in log]
        assert logged[0] == 0.5
        betas[target] = logged[-1]
        assert trainer.policy_loss.beta == logged[-1]
    assert betas[1e-6] > 0.5 > betas[10.0]


def test_beta_goes_on_from_a_checkpoint(make_config, tmp_path):
    settings = {"dro_target_kl": 1e-4, "num_iterations": 4, "max_steps": 8}
    settings |= {"save_strategy": "steps", "save_steps": 4}
    whole = make_trainer(make_config(**settings))
    whole.train()
    saved = json.loads(Path(tmp_path, "run", "checkpoint-4", "trainer_state.json").read_text())
    state = saved["stateful_callbacks"]["AdaptiveBeta"]
    assert state["args"]["beta"] != 0.5

    for restore in (False, True):  # transformers has a way of its own to bring callbacks back
        resumed = make_trainer(make_config(**settings, restore_callback_states_from_checkpoint=restore))
        resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
        logs = [log["dro/beta"] for log in resumed.state.log_history if "dro/beta" in log]
        assert logs == pytest.approx([log["dro/beta"] for log in whole.state.log_history if "dro/beta" in log])
        assert resumed._adaptive_beta.state() == whole._adaptive_beta.state()


@pytest.mark.parametrize("restore", [False, True])
def test_a_resumed_run_may_have_another_target(make_config, tmp_path, restore):
    settings = {"num_iterations": 4, "max_steps": 8, "save_strategy": "steps", "save_steps": 4}
    make_trainer(make_config(dro_target_kl=1e-4, **settings)).train()
    settings["restore_callback_states_from_checkpoint"] = restore
    checkpoint = str(tmp_path / "run" / "checkpoint-4")
    resumed = make_trainer(make_config(dro_target_kl=10.0, **settings))
    resumed.train(resume_from_checkpoint=checkpoint)
    assert resumed._adaptive_beta.target_kl == 10.0
    with pytest.raises(ValueError, match="adapts_dro_beta was True and is False"):
        make_trainer(make_config(**settings)).train(resume_from_checkpoint=checkpoint)


def test_beta_stays_where_no_completion_has_an_advantage(make_config):
    config = make_config(dro_target_kl=0.01, max_steps=12, num_iterations=4)
    trainer = make_trainer(config, reward_funcs=lambda completions, **_: [0.0] * len(completions))
    trainer.train()
    assert [log["dro/beta"] for log in trainer.state.log_history if "dro/beta" in log] == [0.5] * 12


def simulate(beta: float, target: float, steps: int = 400, period: int = 2) -> list[float]:
    """A policy that goes to where the penalty stops it, l = A / beta, or as far as its learning rate lets it."""
    controller, betas = AdaptiveBeta(beta, target, period), []
    for step in range(steps):
        distance = min(1.0 / controller.beta, 2.0) * (step % period) / (period - 1)
        betas.append(controller.update(distance**2 / 2))
    return betas


@pytest.mark.parametrize("period", [2, 16])
@pytest.mark.parametrize("start", [0.05, 0.5, 20.0, 900.0])
def test_the_controller_settles_without_swinging(start, period):
    betas = simulate(start, target=0.02, period=period)
    late = betas[-100:]
    assert max(late) / min(late) < 1.1
    assert late[-1] == pytest.approx(simulate(1.0, target=0.02, period=period)[-1], rel=0.1)


def test_the_controller_stays_in_bounds():
    controller = AdaptiveBeta(0.5, 1e-3, 1)
    for _ in range(5000):
        controller.update(0.0)
    assert controller.beta == 1e-3
    for _ in range(5000):
        controller.update(1e9)
    assert controller.beta == 1e3
    for poison in (math.nan, math.inf):
        assert controller.update(poison) <= 1e3
    assert AdaptiveBeta(1e-5, 1e-3, 1).lowest == 1e-5
