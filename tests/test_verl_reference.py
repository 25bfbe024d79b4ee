"""Losses and gradients as verl computes them, from recorded values of running it (float64)."""

import json
from pathlib import Path

import pytest
import torch

from trl_dro.aggregation import aggregate_loss
from trl_dro.policy_loss import PolicyLossInputs, apply_correction_weights, get_policy_loss


REFERENCE = json.loads((Path(__file__).parent / "data" / "verl_policy_losses.json").read_text())
KNOBS = REFERENCE["parameters"]
BOUNDS = {"epsilon_low": KNOBS["clip_ratio_low"], "epsilon_high": KNOBS["clip_ratio_high"]}
# verl's name -> ours, and verl's knobs under our names
OBJECTIVES = {
    "vanilla": ("ppo_clip", {**BOUNDS, "dual_clip": KNOBS["clip_ratio_c"]}),
    "dppo_tv": ("dppo_tv", {**BOUNDS, "ratio_max": KNOBS["clip_ratio_c"]}),
    "dppo_kl": ("dppo_kl", {**BOUNDS, "ratio_max": KNOBS["clip_ratio_c"]}),
    "gspo": ("gspo", BOUNDS),
    "sapo": ("sapo", {"temperature_pos": KNOBS["tau_pos"], "temperature_neg": KNOBS["tau_neg"]}),
    "gpg": ("reinforce", {}),
    "clip_cov": (
        "clip_cov",
        {
            **BOUNDS,
            "cov_fraction": KNOBS["clip_cov_ratio"],
            "cov_low": KNOBS["clip_cov_lb"],
            "cov_high": KNOBS["clip_cov_ub"],
        },
    ),
    "kl_cov": ("kl_cov", {"cov_fraction": KNOBS["kl_cov_ratio"], "kl_coef": KNOBS["ppo_kl_coef"]}),
    "geo_mean": ("gmpo", BOUNDS),
    "dro": ("dro", {"beta": KNOBS["dro_beta"]}),
    "cispo": ("cispo", BOUNDS),
}
CASES = [(batch, case) for batch in REFERENCE["batches"] for case in batch["cases"]]


def case_id(index: int) -> str:
    _, case = CASES[index]
    weighted, window = "weighted" * case["weighted"], "window" * ("dp_size" in case["window"])
    return "-".join(filter(None, (case["policy_loss"], case["loss_agg_mode"], weighted, window)))


def test_every_recorded_case_is_run():
    assert len(CASES) == 169
    assert {case["policy_loss"] for _, case in CASES} == set(OBJECTIVES)
    assert len({case_id(index) for index in range(len(CASES))}) == 169


@pytest.mark.parametrize("index", range(len(CASES)), ids=case_id)
def test_loss_and_gradient_are_verls(index):
    batch, case = CASES[index]
    name, params = OBJECTIVES[case["policy_loss"]]
    objective = get_policy_loss(name, **params)
    logps, old, advantages, mask, weights = (
        torch.tensor(batch[key], dtype=torch.float64)
        for key in ("per_token_logps", "old_per_token_logps", "advantages", "mask", "correction_weights")
    )
    logps.requires_grad_()

    per_token_loss = objective(PolicyLossInputs(logps, old, advantages, mask)).per_token_loss
    if case["weighted"]:
        per_token_loss = apply_correction_weights(objective, per_token_loss, weights, mask)
    mode, rows_over_trained_rows = case["loss_agg_mode"], 1.0
    if mode == "plain-mean":
        # verl's geo_mean averages over all rows, a fully masked one included; here it is no sequence.
        mode, rows_over_trained_rows = "seq-mean-token-mean", len(mask) / mask.any(dim=1).sum().item()
    window = case["window"]
    loss = aggregate_loss(
        per_token_loss,
        mask,
        mode,
        num_tokens=window.get("batch_num_tokens"),
        num_sequences=window.get("global_batch_size"),
        scale_factor=window.get("loss_scale_factor"),
        num_processes=window.get("dp_size", 1),
    )
    loss.backward()

    expected = torch.tensor(case["grad"], dtype=torch.float64) * rows_over_trained_rows
    assert loss.item() == pytest.approx(case["loss"] * rows_over_trained_rows, rel=1e-8, abs=1e-8)
    torch.testing.assert_close(logps.grad, expected, rtol=1e-8, atol=1e-8)
