import dataclasses
import os
import subprocess
import sys
from dataclasses import dataclass, field

import pytest
import torch

from trl_dro import policy_loss
from trl_dro.objectives import CISPO, DRO, GMPO, PPOClip, Reinforce
from trl_dro.policy_loss import (
    PolicyLossInputs,
    PolicyLossOutput,
    apply_correction_weights,
    canonical_name,
    get_policy_loss,
    list_policy_losses,
    nearest_first,
    policy_loss_parameters,
    register_policy_loss,
    resolve_policy_loss,
)


NAN, INF = float("nan"), float("inf")


@pytest.fixture
def registry(monkeypatch):
    """A registry, and a `sys.path`, that the test may change."""
    monkeypatch.setattr(policy_loss, "_CLASSES", dict(policy_loss._CLASSES))
    monkeypatch.setattr(policy_loss, "_CANONICAL", dict(policy_loss._CANONICAL))
    monkeypatch.setattr(sys, "path", list(sys.path))


def inputs_of(logps, old, advantages, mask) -> PolicyLossInputs:
    return PolicyLossInputs(*(torch.tensor(x) for x in (logps, old, advantages, mask)))


# Inputs


def test_masked_positions_of_the_inputs_hold_zeros():
    inputs = inputs_of([[-1.0, NAN]], [[-2.0, INF]], [[3.0, -INF]], [[1, 0]])

    assert inputs.mask.tolist() == [[True, False]]
    assert inputs.per_token_logps.tolist() == [[-1.0, 0.0]]
    assert inputs.old_per_token_logps.tolist() == [[-2.0, 0.0]]
    assert inputs.advantages.tolist() == [[3.0, 0.0]]
    assert inputs.log_ratio.tolist() == [[1.0, 0.0]]
    assert inputs.ratio.tolist()[0] == pytest.approx([2.718281828, 1.0])


def test_a_sequence_advantage_is_spread_over_its_trained_tokens():
    inputs = inputs_of([[-1.0, -1.0], [-1.0, -1.0]], [[-1.0, -1.0]] * 2, [[2.0], [NAN]], [[1, 1], [0, 0]])
    assert inputs.advantages.tolist() == [[2.0, 2.0], [0.0, 0.0]]


def test_only_the_policys_log_probs_keep_a_gradient():
    logps, old, advantages = (torch.full((1, 2), -1.0, requires_grad=True) for _ in range(3))
    inputs = PolicyLossInputs(logps, old, advantages, torch.ones(1, 2))

    (inputs.log_ratio * inputs.advantages).sum().backward()

    assert logps.grad.tolist() == [[-1.0, -1.0]]
    assert old.grad is None
    assert advantages.grad is None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_all_inputs_get_the_dtype_of_the_log_probs_raised_to_float32(given, expected):
    logps = torch.full((1, 2), -1.0, dtype=given)
    inputs = PolicyLossInputs(logps, logps.float(), logps.double(), torch.ones(1, 2))
    assert {inputs.per_token_logps.dtype, inputs.old_per_token_logps.dtype, inputs.advantages.dtype} == {expected}


def test_replacing_a_field_normalises_again():
    inputs = inputs_of([[-1.0, NAN]], [[-2.0, NAN]], [[1.0]], [[1, 0]])
    replaced = dataclasses.replace(inputs, old_per_token_logps=torch.tensor([[-3.0, NAN]]))
    assert replaced.log_ratio.tolist() == [[2.0, 0.0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"per_token_logps": torch.zeros(3)}, r"per_token_logps must have shape \(B, T\).*got \(3,\)"),
        (
            {"old_per_token_logps": torch.zeros(2, 4)},
            r"old_per_token_logps must have the shape.*\(2, 3\); got \(2, 4\)",
        ),
        ({"mask": torch.ones(2, 1)}, r"mask must have the shape.*\(2, 3\); got \(2, 1\)"),
        ({"advantages": torch.zeros(2)}, r"got \(2,\).*write advantages\.unsqueeze\(1\)"),
        ({"advantages": torch.zeros(1, 3)}, r"advantages must have shape \(2, 1\).*or \(2, 3\).*got \(1, 3\)"),
    ],
)
def test_a_wrong_shape_is_refused_by_name(change, message):
    good = {
        "per_token_logps": torch.zeros(2, 3),
        "old_per_token_logps": torch.zeros(2, 3),
        "advantages": torch.zeros(2, 1),
        "mask": torch.ones(2, 3),
    }
    with pytest.raises(ValueError, match=message):
        PolicyLossInputs(**{**good, **change})


# Outputs


def test_metrics_are_detached_floats():
    loss = torch.ones(1, 2, requires_grad=True)
    output = PolicyLossOutput(loss, {"flag": torch.tensor([[True, False]]), "size": loss * 2})

    assert output.metrics["flag"].tolist() == [[1.0, 0.0]]
    assert output.metrics["flag"].dtype == torch.float32
    assert not output.metrics["size"].requires_grad
    assert output.per_token_loss.requires_grad


def test_a_loss_that_is_already_reduced_is_refused():
    with pytest.raises(ValueError, match="the work of loss_agg_mode"):
        PolicyLossOutput(torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"metric 'share' must have shape \(2, 3\).*or \(2, 1\).*got \(\)"):
        PolicyLossOutput(torch.zeros(2, 3), {"share": torch.tensor(1.0)})


# Correction weights


def test_correction_weights_multiply_token_by_token():
    loss, mask = torch.tensor([[1.0, 2.0, NAN]]), torch.tensor([[1, 1, 0]])

    per_token = apply_correction_weights(Reinforce(), loss, torch.tensor([[0.5, 3.0, NAN]]), mask)
    per_sequence = apply_correction_weights(Reinforce(), loss, torch.tensor([[0.5]]), mask)

    assert per_token.tolist() == [[0.5, 6.0, 0.0]]
    assert per_sequence.tolist() == [[0.5, 1.0, 0.0]]


def test_gmpo_pools_correction_weights_by_their_geometric_mean():
    # sqrt(0.5 * 8) = 2 on the first row; a zero weight zeroes the second; the third trains nothing.
    loss = torch.tensor([[1.0, 1.0, 1.0]] * 3)
    weights = torch.tensor([[0.5, 8.0, NAN], [0.0, 4.0, 1.0], [NAN, INF, 0.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0]])

    weighted = apply_correction_weights(GMPO(), loss, weights, mask)

    assert weighted.flatten().tolist() == pytest.approx([2.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])


def test_correction_weights_get_no_gradient_and_garbage_spoils_none():
    loss = torch.tensor([[1.0, 2.0]], requires_grad=True)
    weights = torch.tensor([[3.0, NAN]], requires_grad=True)

    for objective in (Reinforce(), GMPO()):
        loss.grad = None
        apply_correction_weights(objective, loss, weights, torch.tensor([[1, 0]])).sum().backward()
        assert loss.grad[0].tolist() == pytest.approx([3.0, 0.0])
    assert weights.grad is None


def test_correction_weights_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"must have shape \(1, 2\) or \(1, 1\); got \(2,\)"):
        apply_correction_weights(Reinforce(), torch.zeros(1, 2), torch.ones(2), torch.ones(1, 2))


def test_an_unknown_correction_pooling_is_refused():
    class Odd(Reinforce):
        correction_pooling = "median"

    with pytest.raises(ValueError, match="Odd: correction_pooling='median' is unknown; use 'token' or 'geometric'"):
        apply_correction_weights(Odd(), torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2))


# Registry


def test_the_catalogue_has_the_names_of_the_design():
    assert list_policy_losses() == [
        "cispo",
        "clip_cov",
        "dppo_kl",
        "dppo_tv",
        "dro",
        "gmpo",
        "gspo",
        "importance_sampling",
        "kl_cov",
        "ppo_clip",
        "reinforce",
        "sapo",
    ]
    aliases = {"gpg": "reinforce", "vanilla": "ppo_clip", "geo_mean": "gmpo"}
    assert {alias: canonical_name(alias) for alias in aliases} == aliases


def test_an_objective_is_made_with_its_parameters():
    assert get_policy_loss("dro", beta=0.5) == DRO(beta=0.5, level="token")
    assert get_policy_loss("vanilla", dual_clip=None) == PPOClip(epsilon_low=0.2, epsilon_high=0.2, dual_clip=None)


def test_a_class_can_be_registered_under_several_names(registry):
    @register_policy_loss("mine", "my_alias")
    @dataclass(frozen=True, kw_only=True)
    class Mine:
        scale: float = 2.0

        def __call__(self, inputs):
            return PolicyLossOutput(-self.scale * inputs.ratio)

    assert resolve_policy_loss("my_alias") is Mine
    assert canonical_name("my_alias") == "mine"
    assert "mine" in list_policy_losses()
    assert "my_alias" not in list_policy_losses()
    assert get_policy_loss("mine", scale=3.0).scale == 3.0


def test_a_taken_name_is_refused_and_registers_nothing(registry):
    with pytest.raises(ValueError, match=r"'gpg' is taken by trl_dro\.objectives\.\w+\.Reinforce"):
        register_policy_loss("fresh", "gpg")(type("Fresh", (Reinforce,), {}))
    assert "fresh" not in list_policy_losses()


def test_registering_needs_a_name_and_a_callable_class(registry):
    with pytest.raises(ValueError, match="needs at least one name"):
        register_policy_loss()
    with pytest.raises(ValueError, match="needs at least one name"):
        register_policy_loss(Reinforce)  # the decorator without brackets
    with pytest.raises(ValueError, match=r"'my\.loss' must not contain a dot"):
        register_policy_loss("my.loss")
    with pytest.raises(ValueError, match=r"must be a class with a method __call__"):
        register_policy_loss("not_callable")(type("NotCallable", (), {}))
    with pytest.raises(ValueError, match=r"must be a class with a method __call__"):
        register_policy_loss("function")(lambda inputs: inputs)


def test_an_unknown_name_lists_the_registered_ones_nearest_first():
    with pytest.raises(ValueError, match=r"policy_loss='gsop' is unknown.*nearest first: gspo, .*ppo_clip"):
        get_policy_loss("gsop")
    with pytest.raises(ValueError, match=r"nearest first: dro, "):
        get_policy_loss("DRO")
    with pytest.raises(ValueError, match=r"nearest first: ppo_clip, "):
        get_policy_loss("ppo")
    with pytest.raises(ValueError, match="policy_loss=None is refused: it must be a string"):
        get_policy_loss(None)


def test_nearest_first_ignores_case_and_keeps_every_word():
    assert nearest_first("Token_Mean", ["seq-sum", "token-mean", "token-sum"]) == [
        "token-mean",
        "token-sum",
        "seq-sum",
    ]


def test_an_unknown_parameter_lists_the_known_ones_nearest_first():
    with pytest.raises(ValueError, match=r"'ppo_clip' has no parameter 'epsilon_hi'.*nearest first: epsilon_high, "):
        get_policy_loss("ppo_clip", epsilon_hi=0.3)
    with pytest.raises(ValueError, match="'reinforce' has no parameter 'name'; it has none"):
        get_policy_loss("reinforce", name=1)


def test_a_missing_beta_says_what_beta_does():
    with pytest.raises(ValueError, match=r"'dro' needs a value for 'beta': .*l\* = A / beta"):
        get_policy_loss("dro")


def test_a_bad_parameter_fails_when_the_objective_is_made():
    with pytest.raises(ValueError, match=r"beta=-1 is not allowed.*l\* = A / beta.*at 20 nats\. Write beta=0\.5\.$"):
        get_policy_loss("dro", beta=-1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bypass_mode", r'not a loss.*anchor_policy="sampling".*rollout correction'),
        ("vespo", r'whole importance weight.*"gspo" and "dro" with level="sequence"'),
        ("bnpo", r'an aggregation.*loss_agg_mode="token-mean"'),
    ],
)
def test_what_is_no_objective_is_refused_with_what_to_use(name, message):
    with pytest.raises(ValueError, match=message):
        get_policy_loss(name)
    with pytest.raises(ValueError, match=message):
        canonical_name(name)


CUSTOM = """
from dataclasses import dataclass
from trl_dro import PolicyLossOutput

@dataclass(frozen=True, kw_only=True)
class Scaled:
    scale: float
    def __call__(self, inputs):
        return PolicyLossOutput(-self.scale * inputs.advantages * inputs.per_token_logps)

class NotAnObjective:
    pass
"""


def test_a_dotted_path_finds_a_class_next_to_the_script(registry, tmp_path, monkeypatch):
    (tmp_path / "losses_next_to_script.py").write_text(CUSTOM)
    monkeypatch.chdir(tmp_path)
    path = "losses_next_to_script.Scaled"

    loss = get_policy_loss(path, scale=3.0)
    inputs = inputs_of([[-1.0, -2.0]], [[-1.0, -1.0]], [[1.0]], [[1, 1]])

    assert loss(inputs).per_token_loss.tolist() == [[3.0, 6.0]]
    assert canonical_name(path) == path
    assert policy_loss_parameters(resolve_policy_loss(path)) == [("scale", "float", "required")]
    with pytest.raises(ValueError, match=r"has no parameter 'scal'; it has, nearest first: scale"):
        get_policy_loss(path, scal=3.0)


def test_a_dotted_path_to_the_catalogue_has_the_canonical_name():
    assert canonical_name("trl_dro.objectives.DRO") == "dro"
    assert get_policy_loss("trl_dro.objectives.DRO", beta=1.0) == DRO(beta=1.0)


def test_a_dotted_path_that_leads_nowhere_says_where_it_ends(registry, tmp_path, monkeypatch):
    (tmp_path / "half_good_losses.py").write_text(CUSTOM)
    (tmp_path / "broken_losses.py").write_text("raise RuntimeError('no GPU today')")
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ValueError, match="importing 'no_such_package' failed with ModuleNotFoundError"):
        get_policy_loss("no_such_package.Loss")
    with pytest.raises(ValueError, match="importing 'broken_losses' failed with RuntimeError: no GPU today"):
        get_policy_loss("broken_losses.Loss")
    with pytest.raises(ValueError, match=r"'half_good_losses' has no 'Scald'\. Its classes: Scaled, "):
        get_policy_loss("half_good_losses.Scald")
    with pytest.raises(ValueError, match=r"'half_good_losses\.NotAnObjective' is not a policy loss"):
        get_policy_loss("half_good_losses.NotAnObjective")


def test_the_parameter_table_shows_types_and_defaults():
    assert policy_loss_parameters(DRO) == [
        ("beta", "float", "required"),
        ("level", "Literal['token', 'sequence']", "token"),
        ("huber_delta", "float | None", None),
    ]
    assert policy_loss_parameters(PPOClip) == [
        ("epsilon_low", "float", 0.2),
        ("epsilon_high", "float", 0.2),
        ("dual_clip", "float | None", 3.0),
    ]
    # The bounds in force when nothing is given, although the fields hold None to tell what is given.
    assert [default for _, _, default in policy_loss_parameters(CISPO)] == [0.2, 0.2, None, None]


def test_field_metadata_explains_a_missing_parameter(registry):
    @register_policy_loss("explained")
    @dataclass(frozen=True, kw_only=True)
    class Explained:
        tau: float = field(metadata={"help": "the temperature, try 1.0"})

        def __call__(self, inputs):
            return PolicyLossOutput(inputs.ratio)

    with pytest.raises(ValueError, match=r"'explained' needs a value for 'tau': the temperature, try 1\.0"):
        get_policy_loss("explained")


def run_python(code: str) -> str:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    "module", ["objectives", "aggregation", "rollout_correction", "advantages", "masking", "windows"]
)
def test_functions_of_tensors_load_neither_trl_nor_transformers_nor_accelerate(module):
    code = f"import sys, trl_dro.{module}; print(sorted({{'trl', 'transformers', 'accelerate'}} & set(sys.modules)))"
    assert run_python(code).strip() == "[]"


def test_the_catalogue_is_there_and_its_names_taken_without_importing_it():
    code = """
from trl_dro.policy_loss import get_policy_loss, register_policy_loss
class Mine:
    def __call__(self, inputs): ...
try:
    register_policy_loss("dro")(Mine)
except ValueError as error:
    print(error)
print(get_policy_loss("gpg"))
"""
    taken, made = run_python(code).splitlines()
    assert "'dro' is taken" in taken
    assert made == "Reinforce()"
