"""What this package takes from TRL's and transformers' insides. A TRL release that changes it fails here."""

import ast
import inspect
import re
from pathlib import Path

import pytest
import transformers
import trl.trainer.utils
from trl import GRPOConfig, GRPOTrainer

import trl_dro
from trl_dro import DROTrainer
from trl_dro.steering import PRIVATE_NAMES
from trl_dro.trainer import _MODEL_INPUTS

from .tiny import length_reward, prompts, tiny_model, tiny_tokenizer


PACKAGE = Path(trl_dro.__file__).parent
TRAINERS = ("evaluation.py", "generation.py", "windowed.py", "resuming.py", "trainer.py")


@pytest.fixture(scope="module")
def grpo(tmp_path_factory) -> GRPOTrainer:
    args = GRPOConfig(
        output_dir=str(tmp_path_factory.mktemp("grpo")),
        use_cpu=True,
        bf16=False,
        activation_checkpointing=False,
        report_to="none",
        num_generations=4,
        max_completion_length=4,
    )
    return GRPOTrainer(
        model=tiny_model(),
        reward_funcs=length_reward,
        args=args,
        train_dataset=prompts(8),
        processing_class=tiny_tokenizer(),
    )


def test_every_private_name_still_exists(grpo):
    for path in PRIVATE_NAMES:
        owner, name = path.split(".")
        target = {"GRPOConfig": GRPOConfig, "utils": trl.trainer.utils}.get(owner, grpo)
        assert hasattr(target, name) or f"self.{name} = " in inspect.getsource(transformers.Trainer), path


def test_the_list_of_private_names_is_complete():
    """Every `self._x` or `super()._x` of the trainers is its own, or listed."""
    tree = ast.parse("\n".join((PACKAGE / name).read_text() for name in TRAINERS))
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
    }
    inherited = {name for name in used if hasattr(GRPOTrainer, name) or name in source_of_grpo_attributes()}
    listed = {path.split(".")[1] for path in PRIVATE_NAMES}
    assert inherited - listed == set()
    assert {path.split(".")[1] for path in PRIVATE_NAMES if path.startswith("GRPOTrainer")} - used <= {
        "_name",
        "_paper",
        "_tag_names",
    }


def source_of_grpo_attributes() -> set[str]:
    """Names that GRPOTrainer assigns to `self`."""
    tree = ast.parse(inspect.getsource(inspect.getmodule(GRPOTrainer)))
    return {
        target.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"
    }


def test_no_own_attribute_shadows_one_of_trl():
    tree = ast.parse("\n".join((PACKAGE / name).read_text() for name in TRAINERS))
    own = {
        target.attr
        for node in ast.walk(tree)
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"
    }
    listed = {path.split(".")[1] for path in PRIVATE_NAMES}
    assert (own & source_of_grpo_attributes()) - listed == {"beta", "entropy_coef"}


def test_the_constructor_takes_what_trls_takes():
    ours, theirs = inspect.signature(DROTrainer.__init__), inspect.signature(GRPOTrainer.__init__)
    assert list(ours.parameters) == list(theirs.parameters)
    for name, parameter in theirs.parameters.items():
        assert ours.parameters[name].default == parameter.default, name


def test_overridden_methods_take_what_trls_take():
    for name in (
        "compute_loss",
        "training_step",
        "log",
        "get_batch_samples",
        "train",
        "_save_checkpoint",
        "_load_optimizer_and_scheduler",
        "_prepare_inputs",
        "_generate_and_score_completions",
    ):
        ours = inspect.signature(getattr(DROTrainer, name)).parameters
        theirs = inspect.signature(getattr(GRPOTrainer, name)).parameters
        assert list(ours) == list(theirs), name


def test_scoring_takes_the_inputs_it_is_given():
    parameters = inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters
    assert list(parameters)[:5] == ["self", "model", "input_ids", "attention_mask", "logits_to_keep"]
    assert {"compute_entropy", "compute_aux_loss"} <= parameters.keys()
    assert {"pixel_values", "image_grid_thw", "num_images"} <= set(_MODEL_INPUTS)


def test_the_training_loop_announces_each_window_and_leaves_scaling_to_the_loss(grpo):
    loop = inspect.getsource(transformers.Trainer._run_epoch)
    assert "self.get_batch_samples(" in loop
    assert "self.current_gradient_accumulation_steps = len(batch_samples)" in loop
    assert "_set_sync_gradients(do_sync_step)" in loop
    assert grpo.loss_is_scaled_for_ga is True


def test_trl_generates_when_its_buffer_is_empty_and_fills_it_with_one_entry_a_micro_batch(grpo):
    grpo.model.train()
    grpo._step, grpo._buffered_inputs = 1, None
    grpo.current_gradient_accumulation_steps = 1
    batch = next(iter(grpo.get_train_dataloader()))
    grpo._prepare_inputs(batch)
    assert isinstance(grpo._buffered_inputs, list)
    assert len(grpo._buffered_inputs) == grpo.args.steps_per_generation
    assert {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages"} <= grpo._buffered_inputs[
        0
    ].keys()
    assert "old_per_token_logps" not in grpo._buffered_inputs[0]


def test_trl_decides_what_to_score_from_the_attributes_that_are_set_for_it():
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    assert "self.args.gradient_accumulation_steps % generate_every != 0" in source
    assert "generate_every = self.args.steps_per_generation * self.num_iterations" in source
    # set otherwise for the length of the call, so nothing else in it may read them
    for name in (r"args\.gradient_accumulation_steps", r"args\.steps_per_generation"):
        assert len(re.findall(rf"self\.{name}\b", source)) == 1
        assert not re.search(name, inspect.getsource(GRPOTrainer._generate))
    assert "if self.beta != 0.0:" in source
    constructor = inspect.getsource(GRPOTrainer.__init__)
    assert "self.beta = args.beta" in constructor
    assert "args.beta != 0.0" in constructor
