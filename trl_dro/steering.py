"""How this package steers TRL: the private names that it touches, and the one way it changes them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


# Every private name of TRL and transformers that this package reads, sets or overrides.
# tests/test_trl_contract.py checks that each still exists and still means the same.
PRIVATE_NAMES = {
    "GRPOTrainer._prepare_inputs": "extended: plans the window, generates what it needs, attaches its counts",
    "GRPOTrainer._generate_and_score_completions": "extended: decides which policies are scored",
    "GRPOTrainer._get_train_sampler": "extended: a resumed run continues its epoch",
    "GRPOTrainer._calculate_rewards": "extended: infinite rewards and NaN of models are refused",
    "GRPOTrainer._generate_single_turn": "extended: sampling, lengths, empty completions, continuous batching",
    "GRPOTrainer._get_per_token_logps_and_entropies": "extended: on a CPU, only what is asked for is scored",
    "GRPOTrainer._step": "read: micro-steps so far",
    "GRPOTrainer._buffered_inputs": "read and reset: the micro-batches of one generated batch",
    "GRPOTrainer._metrics": "written, read and cleared: metrics to report, a list for each",
    "GRPOTrainer._logs": "read, set while evaluating: the latest prompts, completions and rewards",
    "GRPOTrainer._pending_metrics": "cleared: metrics of reward functions that a failed call left behind",
    "GRPOTrainer._pending_extra_logs": "cleared: columns of reward functions that a failed call left behind",
    "Trainer._save_checkpoint": "extended: whole checkpoints, before old ones are deleted and new ones pushed",
    "Trainer._finalize_training": "extended: a run that was stopped keeps its last checkpoint",
    "Trainer._push_from_checkpoint": "called, once a checkpoint is whole",
    "Trainer._get_output_dir": "called: where checkpoints go",
    "Trainer._load_optimizer_and_scheduler": "extended: takes up the state of this process too",
    "Trainer._load_from_checkpoint": "extended: converts weights that were saved under other names",
    "Trainer._load_best_model": "extended: likewise",
    "Trainer._issue_warnings_after_load": "replaced: notes which names were not loaded",
    "Trainer._eval_dataloaders": "an entry removed: the data loader kept for persistent workers",
    "GRPOTrainer._entropy_bonus_enabled": "read: whether the entropy bonus is active",
    "GRPOTrainer._last_world_entropy": "read and set: entropy of the last window, checkpointed by TRL",
    "GRPOTrainer._name": "set: the method's name in model cards",
    "GRPOTrainer._paper": "set: the paper cited in model cards",
    "GRPOTrainer._tag_names": "set: tags of pushed models",
    "Trainer._save": "extended: leaves the model card as it is",
    "Trainer._finish_current_push": "extended: says which uploads failed",
    "GRPOConfig._VALID_DICT_FIELDS": "extended: dict fields accepted as JSON",
    "utils._use_triton": "set while scoring on a CPU: whether the LM head leaves out prompts and padding",
}


_OF_CLASS = object()


@contextmanager
def temporarily(target: Any, **values: Any) -> Iterator[None]:
    """Set attributes for the length of a call into TRL, which reads its decisions from them."""
    before = {name: vars(target).get(name, _OF_CLASS) for name in values}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is _OF_CLASS:
                delattr(target, name)
            else:
                setattr(target, name, value)
