"""`DROTrainer` against `GRPOTrainer`: the same rollouts give the same weights, option by option.

Both trainers sample from the same seeds, so their rollouts are equal as long as their weights are. Geometry in which
the two are defined alike: whole windows, no fully masked row for the means over sequences.
"""

import warnings

import pytest
import torch
from transformers import Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from trl import GRPOConfig, GRPOTrainer

from trl_dro import DROConfig, DROTrainer

from .tiny import CHARACTERS, FAST, length_reward, prompts, tiny_model, tiny_tokenizer


GEOMETRY = {**FAST, "learning_rate": 1.0, "optim": "sgd", "model_init_kwargs": {"dtype": torch.float64}}

LOSSES = {
    "dapo": {"loss_type": "dapo"},
    "dapo, both clips": {"loss_type": "dapo", "epsilon": 0.02, "delta": 1.3},
    "grpo": {"loss_type": "grpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.05},
    "sapo": {"loss_type": "sapo", "sapo_temperature_neg": 1.25},  # exact in float32, to which TRL rounds it
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.01},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 0.01},
}
OPTIONS = {
    "plain": {},
    "on-policy": {"num_iterations": 1},
    "accumulated": {"gradient_accumulation_steps": 2},
    "kl": {"beta": 0.3, "use_bias_correction_kl": False},
    "bias-corrected kl": {"beta": 0.3},
    "top entropy": {"top_entropy_quantile": 0.5},
    "entropy bonus": {"entropy_coef": 0.1},
    "entropy bonus, accumulated": {"entropy_coef": 0.1, "gradient_accumulation_steps": 2},
    "adaptive entropy below target": {"use_adaptive_entropy": True, "entropy_target": 10.0, "entropy_coef": 0.05},
    "adaptive entropy above target": {"use_adaptive_entropy": True, "entropy_target": 0.01, "entropy_coef": 0.05},
    "off-policy mask": {"off_policy_mask_threshold": 0.001},
    "group scaling off": {"scale_rewards": "none"},
    "batch scaling": {"scale_rewards": "batch"},
}
# Where TRL differentiates through the mean over the sequence, and verl's form, which is ours, does not.
NOT_AT_SEQUENCE_LEVEL = {"bias-corrected kl", "top entropy"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("policy"))
    tiny_model().double().save_pretrained(path)
    return path


def train(trainer_class, args, model, **kwargs):
    trainer = trainer_class(
        model=model,
        reward_funcs=length_reward,
        args=args,
        train_dataset=prompts(),
        processing_class=tiny_tokenizer(),
        **kwargs,
    )
    trainer.train()
    return trainer


def both(settings: dict, load, output_dir, **kwargs):
    """A fresh model for each trainer: TRL patches the model object."""
    source = GRPOConfig(output_dir=str(output_dir), **{**GEOMETRY, **settings})
    ours = DROConfig.from_grpo_config(source)
    return train(GRPOTrainer, source, load(), **kwargs), train(DROTrainer, ours, load(), **kwargs)


def largest_difference(first, second) -> float:
    others = dict(second.named_parameters())
    return max((p - others[name]).abs().max().item() for name, p in first.named_parameters())


CASES = [
    pytest.param(loss, option, id=f"{loss}: {option}")
    for loss in LOSSES
    for option in OPTIONS
    if not (loss in ("gspo", "luspo") and option in NOT_AT_SEQUENCE_LEVEL)
]
# Every loss and every option once in `make test`; the rest of the matrix is slow.
QUICK = {("dapo", option) for option in OPTIONS} | {(loss, "plain") for loss in LOSSES}
CASES = [
    case if tuple(case.values) in QUICK else pytest.param(*case.values, id=case.id, marks=pytest.mark.slow)
    for case in CASES
]


@pytest.mark.parametrize(("loss", "option"), CASES)
def test_weights_and_metrics_equal_trls(loss, option, checkpoint, tmp_path):
    def load():
        return Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)

    trl, ours = both({**LOSSES[loss], **OPTIONS[option]}, load, tmp_path)
    assert largest_difference(load(), trl.model) > 1e-2, "TRL did not train"
    # Norms and rotary angles are float32 inside, so the order of operations shows at 1e-8.
    assert largest_difference(trl.model, ours.model) < 1e-7
    if "accumulated" not in option:
        shared = {"kl", "entropy", "entropy_coef"} | {name for name in trl.state.log_history[0] if "clip" in name}
        for theirs, mine in zip(trl.state.log_history[:4], ours.state.log_history[:4], strict=True):
            for name in shared & theirs.keys():
                assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name


def test_the_router_loss_of_a_mixture_of_experts_equals_trls(tmp_path):
    config = Qwen3MoeConfig(
        vocab_size=len(CHARACTERS) + 4,
        hidden_size=16,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        output_router_logits=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    state = Qwen3MoeForCausalLM(config).state_dict()  # float32: grouped matmul knows no float64

    def load():
        model = Qwen3MoeForCausalLM(config)
        model.load_state_dict(state)
        return model

    settings = {"router_aux_loss_coef": 0.5, "gradient_accumulation_steps": 2, "model_init_kwargs": None}
    trl, ours = both(settings, load, tmp_path)
    assert largest_difference(trl.model, ours.model) < 1e-5
    assert ours.state.log_history[0]["aux_loss"] == pytest.approx(trl.state.log_history[0]["aux_loss"], rel=1e-5)
    unrouted = train(DROTrainer, DROConfig.from_grpo_config(trl.args, router_aux_loss_coef=0.0), load())
    assert largest_difference(ours.model, unrouted.model) > 1e-4


def scripted_rollout(prompts, trainer) -> dict:
    """Ragged completions, with tool output in every second one, from an engine that is a little off."""
    generator = torch.Generator().manual_seed(trainer.state.global_step)
    output = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "env_mask": []}
    for index, prompt in enumerate(prompts):
        length = 3 + index % 5
        output["prompt_ids"].append(trainer.processing_class(prompt)["input_ids"])
        output["completion_ids"].append(torch.randint(4, 30, (length,), generator=generator).tolist())
        output["logprobs"].append((-3.4 + 0.2 * torch.randn(length, generator=generator)).tolist())
        output["env_mask"].append([1, 0] + [1] * (length - 2) if index % 2 else [1] * length)
    return output


def test_tool_output_is_left_out_as_in_trl(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")

    def load():
        return Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)

    trl, ours = both({}, load, tmp_path, rollout_func=scripted_rollout)
    assert largest_difference(trl.model, ours.model) < 1e-7

    def unmasked(prompts, trainer):
        output = scripted_rollout(prompts, trainer)
        return {**output, "env_mask": [[1] * len(mask) for mask in output["env_mask"]]}

    _, everything = both({}, load, tmp_path, rollout_func=unmasked)
    assert largest_difference(ours.model, everything.model) > 1e-4


def test_correction_weights_multiply_the_policy_term_as_in_trl(checkpoint, tmp_path, monkeypatch):
    """TRL makes the weights for vLLM only, so both trainers get the same ones laid into their inputs."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")

    def weighted(trainer_class):
        class Weighted(trainer_class):
            def _generate_and_score_completions(self, inputs):
                output = super()._generate_and_score_completions(inputs)
                ramp = torch.linspace(0.25, 2.0, output["completion_ids"].size(1), dtype=torch.float64)
                return {**output, "importance_sampling_ratio": ramp.expand_as(output["completion_ids"]).clone()}

            def compute_loss(self, model, inputs, *args, **kwargs):
                # What TRL reads beside the weights; nothing is generated here.
                self.use_vllm = self.vllm_importance_sampling_correction = True
                try:
                    return super().compute_loss(model, inputs, *args, **kwargs)
                finally:
                    self.use_vllm = False

        return Weighted

    def load():
        return Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)

    settings = {"beta": 0.3, "off_policy_mask_threshold": 0.01}
    source = GRPOConfig(output_dir=str(tmp_path), **{**GEOMETRY, **settings})
    trl = train(weighted(GRPOTrainer), source, load(), rollout_func=scripted_rollout)
    config = DROConfig.from_grpo_config(source)
    ours = train(weighted(DROTrainer), config, load(), rollout_func=scripted_rollout)
    plain = train(DROTrainer, config, load(), rollout_func=scripted_rollout)
    assert largest_difference(trl.model, ours.model) < 1e-7
    assert largest_difference(plain.model, ours.model) > 1e-4


class OffEngine:
    """Stands in for vLLM: scripted completions, with log-probs that are a little off the policy's."""

    def __init__(self, *, model, **_):
        self.model, self.calls = model, 0

    def sync_weights(self):
        pass

    def generate(self, prompts, images, num_generations, profiler=None):
        self.calls += 1
        generator = torch.Generator().manual_seed(self.calls)
        completion_ids, logprobs = [], []
        for index in range(len(prompts)):
            length = 3 + index % 5
            completion_ids.append(torch.randint(4, 30, (length,), generator=generator).tolist())
            off = -3.4 + 0.4 * torch.randn(length, generator=generator)
            logprobs.append(
                [[None] if index == 0 and token == 0 else [value] for token, value in enumerate(off.tolist())]
            )
        return prompts, completion_ids, logprobs, None


MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
# At sequence level the token modes are refused.
CORRECTED = [
    pytest.param(loss, mode, marks=[] if loss == "dapo" else pytest.mark.slow)
    for loss in LOSSES
    for mode in MODES
    if not (loss in ("gspo", "luspo") and mode.startswith("token_"))
]


@pytest.mark.parametrize(("loss", "mode"), CORRECTED)
def test_trls_correction_of_the_engines_mismatch_is_honoured_in_every_mode(
    loss, mode, checkpoint, tmp_path, monkeypatch
):
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", OffEngine)

    def load():
        return Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)

    bounds = {"vllm_importance_sampling_clip_min": 0.6, "vllm_importance_sampling_clip_max": 1.5}
    settings = {**LOSSES[loss], "use_vllm": True, "vllm_importance_sampling_mode": mode, **bounds}
    settings |= {"beta": 0.3, "use_bias_correction_kl": False, "off_policy_mask_threshold": 0.05}
    trl, ours = both(settings, load, tmp_path)
    assert largest_difference(trl.model, ours.model) < 1e-7
    off = {name: value for name, value in settings.items() if not name.startswith("vllm_importance_sampling_")}
    uncorrected, _ = both({**off, "vllm_importance_sampling_correction": False}, load, tmp_path)
    assert largest_difference(ours.model, uncorrected.model) > 1e-4


def test_a_continued_adapter_has_its_own_copy_as_reference_as_in_trl(checkpoint, tmp_path):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    adapter = peft.get_peft_model(
        Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float64),
        peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False),
    )
    adapter.double().save_pretrained(tmp_path / "adapter")

    def load():
        base = Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
        return peft.PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True).double()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft warns of what TRL does with its adapters
        trl, ours = both({"beta": 0.3, "use_bias_correction_kl": False}, load, tmp_path)
    assert largest_difference(trl.model, ours.model) < 1e-7
    assert ours.state.log_history[1]["kl"] == pytest.approx(trl.state.log_history[1]["kl"], rel=1e-4)


@pytest.mark.parametrize("settings", [{}, {"beta": 0.3}], ids=str)
def test_an_adapter_of_another_name_trains_as_the_default_one_in_trl(settings, checkpoint, tmp_path):
    """TRL knows the name `default` only, so its adapter bears it."""
    peft = pytest.importorskip("peft")

    def load(name):
        torch.manual_seed(0)
        base = Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
        lora = peft.LoraConfig(
            r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False
        )
        return peft.get_peft_model(base, lora, adapter_name=name).double()

    source = GRPOConfig(output_dir=str(tmp_path), **{**GEOMETRY, **settings})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft warns of what TRL does with its adapters
        trl = train(GRPOTrainer, source, load("default"))
        ours = train(DROTrainer, DROConfig.from_grpo_config(source), load("mine"))
    mine, start = dict(ours.model.named_parameters()), dict(load("default").named_parameters())
    trained = [name for name, parameter in trl.model.named_parameters() if parameter.requires_grad]
    assert trained
    parameters = dict(trl.model.named_parameters())
    assert max((parameters[name] - start[name]).abs().max().item() for name in trained) > 1e-4
    for name in trained:
        torch.testing.assert_close(mine[name.replace("default", "mine")], parameters[name], rtol=0, atol=1e-7)


def truncating_rollout(prompts, trainer) -> dict:
    """As the scripted one, without end of sequence in every fourth completion."""
    output = scripted_rollout(prompts, trainer)
    output["completion_ids"] = [
        ids if index % 4 == 3 else [*ids[:-1], 2] for index, ids in enumerate(output["completion_ids"])
    ]
    return {name: output[name] for name in ("prompt_ids", "completion_ids", "logprobs")}


def test_truncated_completions_are_masked_as_in_trl(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")

    def load():
        return Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)

    trl, ours = both({"mask_truncated_completions": True}, load, tmp_path, rollout_func=truncating_rollout)
    assert largest_difference(trl.model, ours.model) < 1e-7


# Outside that geometry the two differ, each difference named in docs/migrating.md.


@pytest.mark.filterwarnings("ignore:mask_truncated_completions=True with loss_type:UserWarning")
def test_difference_means_over_sequences_leave_out_masked_rows(checkpoint, tmp_path, monkeypatch):
    """A quarter of the rows is masked: TRL divides by all rows, this package by the rows that are trained."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")

    def load():
        return Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)

    settings = {"loss_type": "grpo", "mask_truncated_completions": True, "max_steps": 1, "learning_rate": 0.1}
    trl, ours = both(settings, load, tmp_path, rollout_func=truncating_rollout)
    start = dict(load().named_parameters())
    moved = {name: p - start[name] for name, p in ours.model.named_parameters()}
    for name, p in trl.model.named_parameters():
        torch.testing.assert_close((p - start[name]) * 4 / 3, moved[name], rtol=1e-5, atol=1e-7)


def test_difference_token_means_are_those_of_each_optimizer_step(checkpoint, tmp_path, monkeypatch):
    """One generated batch in two optimizer steps: TRL divides each by half of the batch's tokens."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")

    def load():
        return Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)

    settings = {"steps_per_generation": 2, "num_iterations": 1, "max_steps": 1, "learning_rate": 0.1}
    counts = []

    class Counting(DROTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            counts.append((inputs["num_items_in_batch"].item() / 2, inputs["window_num_tokens"].item()))
            return super().compute_loss(model, inputs, *args, **kwargs)

    source = GRPOConfig(output_dir=str(tmp_path), **{**GEOMETRY, **settings})
    trl = train(GRPOTrainer, source, load(), rollout_func=truncating_rollout)
    ours = train(Counting, DROConfig.from_grpo_config(source), load(), rollout_func=truncating_rollout)
    theirs, exact = counts[0]
    assert theirs != exact
    start = dict(load().named_parameters())
    moved = {name: p - start[name] for name, p in ours.model.named_parameters()}
    for name, p in trl.model.named_parameters():
        torch.testing.assert_close((p - start[name]) * theirs / exact, moved[name], rtol=1e-5, atol=1e-7)


def test_difference_metrics_of_an_accumulated_step_are_over_its_tokens(checkpoint, tmp_path, monkeypatch):
    """Two ragged micro-batches: this package logs what one batch of both gives, TRL the mean of the two means."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")

    def load():
        return Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)

    names = ("kl", "clip_ratio/region_mean")
    settings = {"beta": 0.3, "shuffle_dataset": False, "max_steps": 4}
    halves = {**settings, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
    whole, _ = both(settings, load, tmp_path, rollout_func=truncating_rollout)
    trl, ours = both(halves, load, tmp_path, rollout_func=truncating_rollout)
    for name in names:
        expected = whole.state.log_history[3][name]
        assert ours.state.log_history[3][name] == pytest.approx(expected, rel=1e-6)
        assert trl.state.log_history[3][name] != pytest.approx(expected, rel=1e-3)
