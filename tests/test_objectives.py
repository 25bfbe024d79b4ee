"""The objectives against numbers worked out by hand, closed-form gradients, and what the contract promises for all."""

import math

import pytest
import torch

from trl_dro.aggregation import LOSS_AGG_MODES, aggregate_loss
from trl_dro.objectives import (
    CISPO,
    DPPOKL,
    DPPOTV,
    DRO,
    GMPO,
    GSPO,
    SAPO,
    ClipCov,
    ImportanceSampling,
    KLCov,
    PPOClip,
    Reinforce,
)
from trl_dro.policy_loss import PolicyLossInputs, get_policy_loss, list_policy_losses


NAN, INF = float("nan"), float("inf")

REQUIRED = {"dro": {"beta": 0.7}}
# Every registered objective, and settings of it that take another branch. The covariance bounds suit the test batch.
OBJECTIVES = {name: get_policy_loss(name, **REQUIRED.get(name, {})) for name in list_policy_losses()}
OBJECTIVES |= {
    "dro-sequence": DRO(beta=0.7, level="sequence"),
    "ppo_clip-single": PPOClip(dual_clip=None),
    "cispo-bounds": CISPO(ratio_max=4.0),
    "clip_cov-active": ClipCov(cov_fraction=0.3, cov_low=0.01),
    "kl_cov-active": KLCov(cov_fraction=0.3, kl_coef=0.5),
}
every_objective = pytest.mark.parametrize("loss", OBJECTIVES.values(), ids=OBJECTIVES.keys())


def run(loss, logps, old, advantages, mask=None):
    """Per-token loss, gradient of its sum, and metrics, all as nested lists, from lists in float64."""
    logps = torch.tensor(logps, dtype=torch.float64, requires_grad=True)
    mask = torch.ones_like(logps) if mask is None else torch.tensor(mask)
    old, advantages = (torch.tensor(x, dtype=torch.float64) for x in (old, advantages))
    output = loss(PolicyLossInputs(logps, old, advantages, mask))
    output.per_token_loss.sum().backward()
    metrics = {name: value.tolist() for name, value in output.metrics.items()}
    return output.per_token_loss.tolist(), logps.grad.tolist(), metrics


def log(*probs):
    return [math.log(p) for p in probs]


def approx(rows):
    return [pytest.approx(row, rel=1e-9, abs=1e-12) for row in rows]


# DRO


def test_dro_per_token():
    # beta = 0.8. Row 1, A = 2: l = 0.5 and -0.25.
    #   -(2 * -1.0 - 0.4 * 0.25) = 2.1        gradient -(2 - 0.8 * 0.5) = -1.6
    #   -(2 * -0.5 - 0.4 * 0.0625) = 1.025    gradient -(2 + 0.8 * 0.25) = -2.2
    # Row 2, A = -1: l = -0.25 and -2.
    #   -(-1 * -2 - 0.4 * 0.0625) = -1.975    gradient -(-1 + 0.8 * 0.25) = 0.8
    #   -(-1 * -3 - 0.4 * 4) = -1.4           gradient -(-1 + 0.8 * 2) = -0.6: past l* = A/beta, pulled back
    loss, grad, metrics = run(
        DRO(beta=0.8), [[-1.0, -0.5], [-2.0, -3.0]], [[-1.5, -0.25], [-1.75, -1.0]], [[2.0], [-1.0]]
    )
    assert loss == approx([[2.1, 1.025], [-1.975, -1.4]])
    assert grad == approx([[-1.6, -2.2], [0.8, -0.6]])
    assert metrics["dro/penalty_abs"] == approx([[0.4, 0.2], [0.2, 1.6]])
    assert metrics["dro/advantage_abs"] == approx([[2.0, 2.0], [1.0, 1.0]])
    assert metrics["dro/past_optimum"] == [[0.0, 0.0], [0.0, 1.0]]


def test_dro_per_sequence():
    # beta = 0.8. Row 1, A = 2: l = 0.5, -0.25, S = 0.25, penalty 0.4 * l * S = 0.05 and -0.025 (sum: 0.4 * S^2).
    #   2 + 0.05, 1 - 0.025                   gradient -(2 - 0.8 * 0.25) = -1.8 on both
    # Row 2, A = -1: l = -0.25, -2, S = -2.25, penalty 0.4 * l * S = 0.225 and 1.8.
    #   -2 + 0.225, -3 + 1.8                  gradient -(-1 + 0.8 * 2.25) = -0.8 on both
    loss, grad, metrics = run(
        DRO(beta=0.8, level="sequence"), [[-1.0, -0.5], [-2.0, -3.0]], [[-1.5, -0.25], [-1.75, -1.0]], [[2.0], [-1.0]]
    )
    assert loss == approx([[2.05, 0.975], [-1.775, -1.2]])
    assert grad == approx([[-1.8, -1.8], [-0.8, -0.8]])
    assert metrics["dro/penalty_abs"] == approx([[0.2], [1.8]])
    assert metrics["dro/advantage_abs"] == approx([[2.0], [1.0]])
    assert metrics["dro/past_optimum"] == [[0.0], [1.0]]


def test_dro_rests_where_the_log_ratio_is_advantage_over_beta():
    # A / beta = 4 and -2: on each token at token level, as the sum (3 + 1, -0.5 - 1.5) at sequence level.
    _, grad, _ = run(DRO(beta=0.5), [[-1.0], [-3.0]], [[-5.0], [-1.0]], [[2.0], [-1.0]])
    assert grad == approx([[0.0], [0.0]])
    old = [[-4.0, -2.0], [-0.5, -1.0]]
    _, grad, _ = run(DRO(beta=0.5, level="sequence"), [[-1.0, -1.0], [-1.0, -2.5]], old, [[2.0], [-1.0]])
    assert grad == approx([[0.0, 0.0], [0.0, 0.0]])


def test_dro_at_sequence_level_leaves_a_token_of_weight_zero_without_gradient():
    logps = torch.tensor([[-1.0, -2.0, -0.5]], dtype=torch.float64, requires_grad=True)
    inputs = PolicyLossInputs(logps, logps.detach() - 0.3, torch.tensor([[1.0]]), torch.ones(1, 3))
    weights = torch.tensor([[1.0, 0.0, 2.0]], dtype=torch.float64)

    (DRO(beta=0.5, level="sequence")(inputs).per_token_loss * weights).sum().backward()

    # -(A - beta S) = -(1 - 0.5 * 0.9) = -0.55, times the weight
    assert logps.grad.tolist() == approx([[-0.55, 0.0, -1.1]])


def test_past_optimum_is_never_counted_without_an_advantage():
    _, _, metrics = run(DRO(beta=0.5), [[-1.0]], [[-9.0]], [[0.0]])
    assert metrics["dro/past_optimum"] == [[0.0]]


def test_dro_pulls_harder_the_further_away_without_any_clamp():
    # l = 1000: gradient -(1 - 0.5 * 1000) = 499
    loss, grad, _ = run(DRO(beta=0.5), [[-1.0]], [[-1001.0]], [[1.0]])
    assert loss == approx([[1.0 + 0.25 * 1e6]])
    assert grad == approx([[499.0]])


# Policy gradients


def test_reinforce():
    loss, grad, _ = run(Reinforce(), [[-1.0, -0.5], [-2.0, -3.0]], [[-9.0] * 2] * 2, [[2.0, 0.5], [-1.0, -1.0]])
    assert loss == approx([[2.0, 0.25], [-2.0, -3.0]])
    assert grad == approx([[-2.0, -0.5], [1.0, 1.0]])


def test_importance_sampling():
    # r = 0.6 / 0.3 = 2 and 0.2 / 0.8 = 0.25; the gradient of -A r is -A r
    loss, grad, _ = run(ImportanceSampling(), [log(0.6, 0.2)], [log(0.3, 0.8)], [[3.0, -2.0]])
    assert loss == approx([[-6.0, 0.5]])
    assert grad == approx([[-6.0, 0.5]])


def test_cispo_clips_the_weight_and_keeps_the_gradient():
    # r = 2 is clipped to 1.3, r = 0.25 to 0.9, r = 1.1 is kept. Loss -w A logp, gradient -w A.
    loss, grad, metrics = run(
        CISPO(epsilon_low=0.1, epsilon_high=0.3),
        [log(0.6, 0.2, 0.55), log(0.6, 0.2, 0.55)],
        [log(0.3, 0.8, 0.5), log(0.3, 0.8, 0.5)],
        [[2.0], [-1.0]],
    )
    w, logp = (1.3, 0.9, 1.1), log(0.6, 0.2, 0.55)
    assert loss == approx([[-2.0 * w[i] * logp[i] for i in range(3)], [w[i] * logp[i] for i in range(3)]])
    assert grad == approx([[-2.6, -1.8, -2.2], [1.3, 0.9, 1.1]])
    assert metrics["cispo_clip_ratio"] == [[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("loss", "weights"),
    [
        (CISPO(), [0.8, 1.0, 1.2]),
        (CISPO(epsilon_high=0.5), [0.8, 1.0, 1.5]),
        (CISPO(epsilon_low=1.0), [0.25, 1.0, 1.2]),
        (CISPO(ratio_max=1.5), [0.25, 1.0, 1.5]),
        (CISPO(ratio_min=0.5), [0.5, 1.0, 2.0]),
        (CISPO(ratio_min=0.0, ratio_max=4.0), [0.25, 1.0, 2.0]),
    ],
)
def test_cispo_takes_its_bounds_in_either_way(loss, weights):
    _, grad, _ = run(loss, [log(0.2, 0.3, 0.6)], [log(0.8, 0.3, 0.3)], [[-1.0]])
    assert grad == approx([weights])


def test_dppo_tv_trusts_differences_of_probability_and_not_ratios():
    # Gains: 0.01 -> 0.1 (r = 10, capped to 5) is inside; 0.3 -> 0.6 is outside for A > 0, and inside for A < 0;
    # 0.8 -> 0.5 is inside for A > 0 and outside for A < 0. Inside the loss is -w A logp, gradient -w A.
    probs, old = log(0.1, 0.6, 0.5), log(0.01, 0.3, 0.8)
    loss, grad, metrics = run(DPPOTV(ratio_max=5.0), [probs, probs], [old, old], [[2.0], [-1.0]])
    assert loss == approx([[-10 * probs[0], 0, -2 * 0.625 * probs[2]], [5 * probs[0], 2 * probs[1], 0]])
    assert grad == approx([[-10.0, 0.0, -1.25], [5.0, 2.0, 0.0]])
    assert metrics["dppo/masked_ratio"] == [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]


def test_dppo_kl_masks_a_token_that_is_far_and_moving_away():
    # Binary KL(p_old || p): 0.5 -> 0.9: 0.5 ln(5/9) + 0.5 ln 5 = 0.5108; 0.5 -> 0.1 the same by symmetry;
    # 0.5 -> 0.6: 0.5 ln(5/6) + 0.5 ln(5/4) = 0.0204. Bound 0.2: the first two are far, and masked unless A leads back.
    probs, old = log(0.9, 0.1, 0.6), log(0.5, 0.5, 0.5)
    loss, grad, metrics = run(DPPOKL(), [probs, probs], [old, old], [[1.0], [-1.0]])
    assert loss == approx([[0, -0.2 * probs[1], -1.2 * probs[2]], [1.8 * probs[0], 0, 1.2 * probs[2]]])
    assert grad == approx([[0.0, -0.2, -1.2], [1.8, 0.0, 1.2]])
    assert metrics["dppo/masked_ratio"] == [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]


def test_dppo_kl_measures_with_the_bound_of_the_advantages_sign():
    # 0.5 -> 0.6 has KL 0.0204, 0.5 -> 0.4 the same: between the two bounds.
    probs, old = log(0.6, 0.4), log(0.5, 0.5)
    tight_low, tight_high = DPPOKL(epsilon_low=0.02, epsilon_high=0.021), DPPOKL(epsilon_low=0.021, epsilon_high=0.02)
    assert run(tight_low, [probs], [old], [[1.0, -1.0]])[2]["dppo/masked_ratio"] == [[0.0, 1.0]]
    assert run(tight_high, [probs], [old], [[1.0, -1.0]])[2]["dppo/masked_ratio"] == [[1.0, 0.0]]


@pytest.mark.parametrize("loss", [DPPOKL(), DPPOTV()], ids=["kl", "tv"])
def test_dppo_survives_a_probability_rounded_above_one(loss):
    logps = torch.tensor([[1e-6]], requires_grad=True)
    output = loss(PolicyLossInputs(logps, torch.tensor([[-0.01]]), torch.tensor([[1.0]]), torch.ones(1, 1)))
    assert output.metrics["dppo/masked_ratio"].item() == 0.0


# Clipped surrogates


def test_ppo_clip_with_both_bounds_and_the_second_clip():
    # lo 0.2, hi 0.4, c 3. r = 2, 0.5, 1.1, 4.
    # A = 2: clipped to 1.4 -> -2.8 without gradient; 0.5 -> -1; 1.1 -> -2.2; 4 -> -2.8 without gradient.
    # A = -1: 2; 0.5 is clipped to 0.8 without gradient; 1.1; 4 is cut to c = 3 without gradient.
    probs, old = log(0.6, 0.2, 0.55, 0.4), log(0.3, 0.4, 0.5, 0.1)
    loss, grad, metrics = run(PPOClip(epsilon_high=0.4), [probs, probs], [old, old], [[2.0], [-1.0]])
    assert loss == approx([[-2.8, -1.0, -2.2, -2.8], [2.0, 0.8, 1.1, 3.0]])
    assert grad == approx([[0.0, -1.0, -2.2, 0.0], [2.0, 0.0, 1.1, 0.0]])
    assert metrics == {
        "clip_ratio/low_mean": [[0.0] * 4, [0.0, 1.0, 0.0, 0.0]],
        "clip_ratio/high_mean": [[1.0, 0.0, 0.0, 1.0], [0.0] * 4],
        "clip_ratio/region_mean": [[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0]],
        "clip_ratio/low_min": [[0.0], [0.25]],
        "clip_ratio/high_max": [[0.5], [0.0]],
        "clip_ratio/dual_mean": [[0.0] * 4, [0.0, 0.0, 0.0, 1.0]],
    }


def test_ppo_clip_without_the_second_clip_follows_the_ratio():
    loss, grad, metrics = run(PPOClip(dual_clip=None), [log(0.4)], [log(0.1)], [[-1.0]])
    assert (loss, grad) == (approx([[4.0]]), approx([[4.0]]))
    assert "clip_ratio/dual_mean" not in metrics


def test_clip_shares_of_a_sequence_count_its_trained_tokens_only():
    # The first token goes up by 2, the second stays, the rest is masked: clipped for A = 1; the other way for A = -1.
    up, still = log(0.6, 0.3, 0.6, 0.6), log(0.3, 0.3, 0.3, 0.3)
    _, _, metrics = run(PPOClip(), [up, still], [still, up], [[1.0], [-1.0]], mask=[[1, 1, 0, 0]] * 2)
    assert metrics["clip_ratio/high_max"] == [[0.5], [0.0]]
    assert metrics["clip_ratio/low_min"] == [[0.0], [0.5]]


def test_gspo_clips_whole_sequences():
    # Row 1: l = ln 2, ln 0.5, ln 1.1, mean ln(1.1)/3, s = 1.1^(1/3): inside. -A s each, gradient -A s each.
    # Row 2: l = ln 2, ln 2, masked: s = 2, A = 1: clipped to 1.2, no gradient. Row 3: the same with A = -1: 2.
    # Row 4: s = 0.5, A = -1: clipped to 0.8.
    s = 1.1 ** (1 / 3)
    loss, grad, metrics = run(
        GSPO(),
        [log(0.6, 0.2, 0.55), log(0.6, 0.4, 0.9), log(0.6, 0.4, 0.9), log(0.3, 0.2, 0.1)],
        [log(0.3, 0.4, 0.5), log(0.3, 0.2, 0.1), log(0.3, 0.2, 0.1), log(0.6, 0.4, 0.2)],
        [[2.0], [1.0], [-1.0], [-1.0]],
        mask=[[1, 1, 1], [1, 1, 0], [1, 1, 0], [1, 1, 1]],
    )
    assert loss == approx([[-2 * s] * 3, [-1.2, -1.2, 0], [2.0, 2.0, 0], [0.8] * 3])
    assert grad == approx([[-2 * s] * 3, [0, 0, 0], [2.0, 2.0, 0], [0] * 3])
    assert metrics["clip_ratio/high_mean"] == [[0.0], [1.0], [0.0], [0.0]]
    assert metrics["clip_ratio/low_mean"] == [[0.0], [0.0], [0.0], [1.0]]
    assert metrics["clip_ratio/region_mean"] == [[0.0], [1.0], [0.0], [1.0]]


def test_gspo_caps_the_log_ratio_at_10():
    loss, grad, _ = run(GSPO(), [[-1.0]], [[-12.0]], [[-1.0]])
    assert loss == approx([[math.exp(10)]])
    assert grad == approx([[0.0]])


def test_sapo_gates_smoothly():
    # A = 2, t = 1, r = 1: -(4/1) sigmoid(0) * 2 = -4, gradient -4 * 1/4 * 2 = -2, that of -A r.
    # A = -1, t = 2, r = 2: (4/2) sigmoid(2), gradient 4 sigmoid'(2) r = 8 sigmoid(2) (1 - sigmoid(2)).
    sigmoid2 = 1 / (1 + math.exp(-2))
    loss, grad, _ = run(SAPO(temperature_neg=2.0), [log(0.3), log(0.6)], [log(0.3), log(0.3)], [[2.0], [-1.0]])
    assert loss == approx([[-4.0], [2 * sigmoid2]])
    assert grad == approx([[-2.0], [8 * sigmoid2 * (1 - sigmoid2)]])


def test_gmpo_clips_one_side_in_log_space_and_averages_the_sequence():
    # lo 0.4, hi 0.3. Row 1, A = 2: l = 1.0 -> 0.3 (clipped above), -1.0 -> -1.0 (not below): mean -0.35.
    #   -2 exp(-0.35) on each token; the sum of both has gradient 2 * -2 exp(-0.35) / 2 on the token not clipped.
    # Row 2, A = -1: 1.0 -> 1.0 (not above), -1.0 -> -0.4 (clipped below): mean 0.3. exp(0.3) on each token.
    loss, grad, metrics = run(
        GMPO(epsilon_low=0.4, epsilon_high=0.3),
        [[-1.0, -2.0], [-1.0, -2.0]],
        [[-2.0, -1.0], [-2.0, -1.0]],
        [[2.0], [-1.0]],
    )
    assert loss == approx([[-2 * math.exp(-0.35)] * 2, [math.exp(0.3)] * 2])
    assert grad == approx([[0.0, -2 * math.exp(-0.35)], [math.exp(0.3), 0.0]])
    assert metrics["clip_ratio/high_mean"] == [[1.0, 0.0], [0.0, 0.0]]
    assert metrics["clip_ratio/low_mean"] == [[0.0, 0.0], [0.0, 1.0]]


def test_gmpo_averages_token_advantages():
    # mean A = 2, signs + and +, l = 0.1 and 0.3 -> 0.2: -2 exp(0.15), nothing on the masked token
    loss, _, _ = run(GMPO(), [[-1.0, -1.0, -1.0]], [[-1.1, -1.3, 5.0]], [[1.0, 3.0, 50.0]], mask=[[1, 1, 0]])
    assert loss == approx([[-2 * math.exp(0.15)] * 2 + [0.0]])


# Covariance


def test_kl_cov_penalises_the_tokens_of_highest_covariance():
    # Over the trained tokens mean A = 0, mean logp = -2: covariances A (logp + 2) = 1, 0 / 0.5, 0.5 (masked: 8, -2).
    # k = floor(0.5 * 4) = 2: token (0, 0) with l = 0.5, and of the equal ones the first, (1, 0), with l = -0.5.
    # Each pays 0.3 |l| = 0.15; the gradient of that is 0.3 sign(l).
    logps, old = [[-1.0, -2.0, 6.0], [-2.5, -2.5, 0.0]], [[-1.5, -2.0, 0.0], [-2.0, -2.5, 0.0]]
    loss, grad, metrics = run(
        KLCov(cov_fraction=0.5, kl_coef=0.3), logps, old, [[1.0], [-1.0]], mask=[[1, 1, 0], [1, 1, 0]]
    )
    up, down = math.exp(0.5), math.exp(-0.5)
    assert metrics["kl_cov/selected_ratio"] == [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]
    assert loss == approx([[-up + 0.15, -1.0, 0.0], [down + 0.15, 1.0, 0.0]])
    assert grad == approx([[-up + 0.3, -1.0, 0.0], [down - 0.3, 1.0, 0.0]])


def test_kl_cov_selects_at_least_one_token_and_none_from_nothing():
    logps, old = [[-1.0, -2.0]], [[-1.0, -2.0]]
    assert run(KLCov(), logps, old, [[1.0, -1.0]])[2]["kl_cov/selected_ratio"] == [[1.0, 0.0]]
    assert run(KLCov(), logps, old, [[1.0]], mask=[[0, 0]])[2]["kl_cov/selected_ratio"] == [[0.0, 0.0]]


def test_clip_cov_drops_what_lies_strictly_between_its_bounds_and_is_not_clipped():
    # mean A = 0, mean logp = -2: covariances 1, 0 / 1, 0. Token (1, 0) has r = exp(-1) with A < 0: clipped anyway.
    # Only (0, 0) is left to drop; the others are ppo_clip: -1, and 0.8 (clipped), 1.
    logps, old = [[-1.0, -2.0], [-3.0, -2.0]], [[-1.0, -2.0], [-2.0, -2.0]]
    advantages = [[1.0], [-1.0]]
    loss, grad, metrics = run(ClipCov(cov_fraction=1.0, cov_low=0.5, cov_high=1.5), logps, old, advantages)
    assert loss == approx([[0.0, -1.0], [0.8, 1.0]])
    assert grad == approx([[0.0, -1.0], [0.0, 1.0]])
    assert metrics["clip_cov/dropped_ratio"] == [[1.0, 0.0], [0.0, 0.0]]
    for bounds in ({"cov_low": 1.0, "cov_high": 1.5}, {"cov_low": 0.5, "cov_high": 1.0}):
        _, _, metrics = run(ClipCov(cov_fraction=1.0, **bounds), logps, old, advantages)
        assert metrics["clip_cov/dropped_ratio"] == [[0.0, 0.0], [0.0, 0.0]]


def test_clip_cov_drops_exactly_its_share_at_random():
    torch.manual_seed(0)
    logps = torch.linspace(-4, -1, 40, dtype=torch.float64).view(4, 10)
    advantages = torch.tensor([[-1.0], [-1.0], [1.0], [1.0]])
    inputs = PolicyLossInputs(logps, logps, advantages, torch.ones(4, 10))
    loss = ClipCov(cov_fraction=0.15, cov_low=0.0)

    drops = [loss(inputs).metrics["clip_cov/dropped_ratio"] for _ in range(20)]

    assert {drop.sum().item() for drop in drops} == {6.0}  # 0.15 * 40
    assert (sum(drops) > 0).sum() > 20  # over time, others


def test_the_covariance_objectives_say_that_they_rank_over_the_micro_batch():
    undecomposed = [name for name, loss in OBJECTIVES.items() if not getattr(loss, "decomposes_over_rows", True)]
    assert undecomposed == ["clip_cov", "kl_cov", "clip_cov-active", "kl_cov-active"]


# Parameters


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("dro", {"beta": 0}, r"DRO: beta=0 is not allowed: it must be a finite number > 0; .*l\* = A / beta"),
        ("dro", {"beta": INF}, "beta=inf is not allowed"),
        ("dro", {"beta": NAN}, "beta=nan is not allowed"),
        ("dro", {"beta": "0.5"}, "beta='0.5' is not allowed"),
        ("dro", {"beta": True}, "beta=True is not allowed"),
        ("dro", {"beta": None}, "beta=None is not allowed"),
        ("dro", {"beta": 1.0, "level": "row"}, "level='row' is not allowed: write level='token' or level='sequence'"),
        ("ppo_clip", {"epsilon_low": 1.5}, "epsilon_low=1.5 .* from 0 to 1, where 1 means no lower clip"),
        ("ppo_clip", {"epsilon_low": -0.1}, "epsilon_low=-0.1 is not allowed"),
        ("ppo_clip", {"epsilon_high": None}, "epsilon_high=None is not allowed"),
        ("ppo_clip", {"dual_clip": 1.0}, "dual_clip=1.0 .*> 1, or None for no second clip"),
        ("gspo", {"epsilon_high": -1e-4}, "epsilon_high=-0.0001 is not allowed"),
        ("cispo", {"epsilon_high": 0.2, "ratio_max": 4.0}, "epsilon_high, ratio_max mix two ways"),
        ("cispo", {"ratio_min": 2.0, "ratio_max": 1.0}, "ratio_min=2.0 is above ratio_max=1.0"),
        ("cispo", {"ratio_max": 0.0}, "ratio_max=0.0 is not allowed"),
        ("cispo", {"ratio_min": -1.0}, "ratio_min=-1.0 is not allowed"),
        ("cispo", {"epsilon_low": 10.0}, "epsilon_low=10.0 .*1 means no lower clip"),
        ("sapo", {"temperature_neg": 0.0}, r"temperature_neg=0\.0 .*Write temperature_neg=1\.0"),
        ("dppo_tv", {"epsilon_low": -1.0}, "epsilon_low=-1.0 .*bound of the divergence"),
        ("dppo_kl", {"ratio_max": 0.0}, "ratio_max=0.0 is not allowed"),
        ("clip_cov", {"cov_fraction": 0.0}, "cov_fraction=0.0 .*> 0 and <= 1"),
        ("clip_cov", {"cov_low": 5.0, "cov_high": 5.0}, "cov_high=5.0 .*> cov_low=5.0"),
        ("clip_cov", {"cov_low": None}, "cov_low=None is not allowed"),
        ("kl_cov", {"cov_fraction": 2}, "cov_fraction=2 is not allowed"),
        ("kl_cov", {"kl_coef": -1.0}, "kl_coef=-1.0 is not allowed"),
        ("gmpo", {"epsilon_low": -0.1}, "epsilon_low=-0.1 .*bound of the log-ratio"),
    ],
)
def test_a_bad_parameter_is_refused_with_what_to_write(name, params, message):
    with pytest.raises(ValueError, match=message):
        get_policy_loss(name, **params)


def test_bounds_at_the_edge_of_what_is_allowed_are_allowed():
    for name, params in {
        "ppo_clip": {"epsilon_low": 0, "epsilon_high": 0},
        "gspo": {"epsilon_low": 1.0, "epsilon_high": 5.0},
        "gmpo": {"epsilon_low": 3.0},
        "clip_cov": {"cov_fraction": 1, "cov_low": -1.0, "cov_high": 0.0},
    }.items():
        get_policy_loss(name, **params)


# What the contract promises for every objective

B, T = 4, 6


def batch(dtype=torch.float64, seed=3):
    """A ragged batch with both signs, ratios on both sides of every clip, a masked row and a masked token inside."""
    generator = torch.Generator().manual_seed(seed)
    old = -2.5 * torch.rand(B, T, generator=generator, dtype=torch.float64) - 0.05
    logps = (old + 0.6 * torch.randn(B, T, generator=generator, dtype=torch.float64)).clamp(max=-0.01)
    advantages = torch.tensor([[1.3], [-0.8], [0.4], [-1.1]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 0, 1, 0, 0], [0] * 6, [1, 1, 1, 0, 0, 0]])
    return logps.to(dtype), old.to(dtype), advantages.to(dtype), mask


def evaluate(loss, logps, old, advantages, mask):
    """Per-token loss and gradient of a weighted sum, with the random draws of clip_cov held fixed."""
    torch.manual_seed(0)
    logps = logps.clone().requires_grad_()
    output = loss(PolicyLossInputs(logps, old, advantages, mask))
    weights = torch.linspace(0.5, 1.5, logps.numel(), dtype=output.per_token_loss.dtype).view(logps.shape)
    (output.per_token_loss * weights).sum().backward()
    return output.per_token_loss.detach(), logps.grad, output.metrics


@every_objective
@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 1e30])
def test_garbage_at_masked_positions_changes_neither_value_nor_gradient(loss, garbage):
    logps, old, advantages, mask = batch()
    advantages = advantages.expand(B, T)
    clean_loss, clean_grad, clean_metrics = evaluate(loss, logps, old, advantages, mask)
    dirty = [torch.where(mask.bool(), x, garbage) for x in (logps, old, advantages)]

    dirty_loss, dirty_grad, dirty_metrics = evaluate(loss, *dirty, mask)

    assert torch.equal(dirty_loss, clean_loss)
    assert torch.equal(dirty_grad, clean_grad)
    assert clean_grad[mask.bool()].abs().sum() > 0
    assert clean_loss[~mask.bool()].abs().sum() == 0
    assert clean_grad[~mask.bool()].abs().sum() == 0
    assert all(torch.equal(dirty_metrics[name], clean_metrics[name]) for name in clean_metrics)


@every_objective
def test_a_masked_rows_sequence_advantage_may_be_nan(loss):
    logps, old, advantages, mask = batch()
    clean_loss, clean_grad, _ = evaluate(loss, logps, old, advantages, mask)
    advantages[2] = NAN
    dirty_loss, dirty_grad, _ = evaluate(loss, logps, old, advantages, mask)
    assert torch.equal(dirty_loss, clean_loss)
    assert torch.equal(dirty_grad, clean_grad)


not_random = pytest.mark.parametrize(
    "loss",
    [loss for loss in OBJECTIVES.values() if not isinstance(loss, ClipCov)],
    ids=[name for name, loss in OBJECTIVES.items() if not isinstance(loss, ClipCov)],
)


@not_random
def test_masking_a_row_or_a_column_equals_dropping_it(loss):
    logps, old, advantages, mask = batch()
    mask = mask.clone()
    mask[:, 1] = 0
    full, _, _ = evaluate(loss, logps, old, advantages, mask)
    rows, columns = torch.tensor([0, 1, 3]), torch.tensor([0, 2, 3, 4, 5])

    small, _, _ = evaluate(
        loss, logps[rows][:, columns], old[rows][:, columns], advantages[rows], mask[rows][:, columns]
    )

    torch.testing.assert_close(small, full[rows][:, columns], rtol=1e-12, atol=1e-12)


@every_objective
def test_a_row_does_not_feel_the_others_if_the_objective_says_so(loss):
    logps, old, advantages, mask = batch()
    full, _, _ = evaluate(loss, logps, old, advantages, mask)
    alone = [evaluate(loss, logps[i, None], old[i, None], advantages[i, None], mask[i, None])[0] for i in range(B)]
    same = torch.allclose(torch.cat(alone), full, rtol=1e-12, atol=1e-12)
    if getattr(loss, "decomposes_over_rows", True):
        assert same
    elif loss != ClipCov():  # whose default bounds select nothing in so small a batch
        assert not same


@every_objective
def test_half_precision_inputs_are_computed_in_float32(loss):
    logps, old, advantages, mask = batch(torch.bfloat16)
    low, low_grad, _ = evaluate(loss, logps, old, advantages, mask)
    full, full_grad, _ = evaluate(loss, logps.float(), old.float(), advantages.float(), mask)
    assert low.dtype == torch.float32
    assert torch.equal(low, full)
    assert torch.equal(low_grad, full_grad.bfloat16())  # rounded once, on its way into the leaf


@every_objective
def test_one_advantage_per_sequence_equals_the_same_on_each_token(loss):
    logps, old, advantages, mask = batch()
    short, short_grad, _ = evaluate(loss, logps, old, advantages, mask)
    long, long_grad, _ = evaluate(loss, logps, old, advantages.expand(B, T), mask)
    assert torch.equal(short, long)
    assert torch.equal(short_grad, long_grad)


@every_objective
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_log_ratios_stay_finite(loss, dtype):
    far, near = torch.full((2, 3), -1000.5, dtype=dtype), torch.full((2, 3), -0.5, dtype=dtype)
    for logps, old in ((far, near), (near, far)):
        for advantages in ([[1.0], [-1.0]], [[0.0], [0.0]]):
            value, grad, metrics = evaluate(loss, logps, old, torch.tensor(advantages, dtype=dtype), torch.ones(2, 3))
            assert torch.isfinite(value).all()
            assert torch.isfinite(grad).all()
            assert all(torch.isfinite(metric).all() for metric in metrics.values())


@every_objective
def test_metrics_are_detached_and_per_token_or_per_sequence(loss):
    _, _, metrics = evaluate(loss, *batch())
    for name, value in metrics.items():
        assert not value.requires_grad, name
        assert tuple(value.shape) in ((B, T), (B, 1)), name
        assert value.dtype.is_floating_point, name


@every_objective
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_no_objective_reads_a_value_back_to_the_host(loss, mode):
    # On the meta device there are no values, so any .item(), bool(tensor) or nonzero() raises.
    logps = torch.empty(B, T, device="meta", requires_grad=True)
    inputs = PolicyLossInputs(logps, torch.empty_like(logps), logps[:, :1], torch.empty_like(logps))
    output = loss(inputs)
    aggregate_loss(output.per_token_loss, inputs.mask, mode, scale_factor=8.0).backward()
    assert logps.grad.shape == (B, T)


@every_objective
def test_a_batch_with_nothing_to_train_gives_zero_and_no_gradient(loss):
    logps, old, advantages, mask = batch()
    value, grad, _ = evaluate(loss, logps, old, advantages, torch.zeros_like(mask))
    assert value.abs().sum() == 0
    assert grad.abs().sum() == 0


@pytest.mark.parametrize(
    "loss",
    [
        DRO(beta=0.7),
        DRO(beta=0.7, level="sequence"),
        Reinforce(),
        ImportanceSampling(),
        PPOClip(),
        PPOClip(dual_clip=None),
        SAPO(),
        GMPO(),
        KLCov(cov_fraction=0.3, kl_coef=0.5),
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_the_value_of_the_aggregated_loss_has_its_gradient(loss, mode):
    # Not for gspo, cispo and dppo: their stop-gradients make the value another function.
    logps, old, advantages, mask = batch()

    def scalar(logps):
        inputs = PolicyLossInputs(logps, old, advantages, mask)
        return aggregate_loss(loss(inputs).per_token_loss, inputs.mask, mode, scale_factor=8.0)

    assert torch.autograd.gradcheck(scalar, (logps.requires_grad_(),))


decomposing = {name: loss for name, loss in OBJECTIVES.items() if getattr(loss, "decomposes_over_rows", True)}


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("loss", decomposing.values(), ids=decomposing.keys())
def test_the_gradient_of_a_window_does_not_depend_on_its_micro_batches(loss, mode):
    logps, old, advantages, mask = batch()

    def gradient(cuts):
        leaf = logps.clone().requires_grad_()
        for rows in cuts:
            inputs = PolicyLossInputs(leaf[rows], old[rows], advantages[rows], mask[rows])
            per_token_loss = loss(inputs).per_token_loss
            aggregate_loss(
                per_token_loss, mask[rows], mode, num_tokens=12, num_sequences=3, scale_factor=8.0
            ).backward()
        return leaf.grad

    assert (mask.sum(), mask.any(1).sum()) == (12, 3)
    whole = gradient([[0, 1, 2, 3]])
    torch.testing.assert_close(gradient([[3, 0], [2], [1]]), whole, rtol=1e-12, atol=1e-12)
