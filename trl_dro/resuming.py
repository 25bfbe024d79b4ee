"""Stopping and going on: whole checkpoints, exact resumption, and a clean end on SIGTERM."""

import json
import os
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy, rotate_checkpoints
from transformers.training_args import TrainingArguments

from .checkpoints import (
    load_state,
    mark_complete,
    mark_incomplete,
    newest_complete,
    read_marker,
    save_state,
    what_is_missing,
)
from .config_rules import refusal
from .failures import let_gloo_finish
from .models import is_adapter_model, load_converted, names_not_loaded
from .redaction import without_secrets
from .run_setup import check_setup, engine_of, setup_of
from .steering import temporarily
from .windowed import WindowedTrainer


# A process group is often signalled as a whole, and the launcher passes on what it got: one request comes twice.
_SECONDS_OF_ONE_REQUEST = 10.0

# What a process that was ended by SIGTERM returns to its shell.
SIGTERM_EXIT_CODE = 128 + signal.SIGTERM


def checkpoint_to_resume(output_dir: str | None, asked: str | bool | None) -> str | None:
    """The checkpoint that `resume_from_checkpoint` means: a path, or the newest whole one.

    Args:
        output_dir: where the newest one is looked for.
        asked: a path; `True` for the newest one; `"auto"` for the newest one if there is any; `False` or None.

    Raises:
        ValueError: there is none, or it is not whole.
    """
    asked = str(asked)
    if asked.lower() in ("none", "false"):
        return None
    if asked.lower() in ("true", "auto"):
        newest, torn = newest_complete(str(output_dir))
        left_out = "".join(f" {path} is left out: {reason}." for path, reason in torn.items())
        if newest is None and asked.lower() == "true":
            allowed = f"there is no whole checkpoint in output_dir={output_dir!r}.{left_out}".removesuffix(".")
            raise refusal("resume_from_checkpoint", asked, allowed, "resume_from_checkpoint=None")
        if torn:
            warnings.warn(f"{f'Resuming from {newest}' if newest else 'Beginning anew'}.{left_out}", stacklevel=3)
        return newest
    if not Path(asked).is_dir():
        raise refusal("resume_from_checkpoint", asked, "there is no such directory", "resume_from_checkpoint='true'")
    missing = what_is_missing(asked)
    if missing is not None:
        newest, _ = newest_complete(Path(asked).parent)
        instead = f"resume_from_checkpoint={newest!r}"  # None where there is none
        raise refusal("resume_from_checkpoint", asked, f"this checkpoint is not whole, {missing}", instead)
    return asked


class _StopCallback(TrainerCallback):
    """Ends training after an optimizer step, with a checkpoint, once all processes know that one was asked to stop."""

    def __init__(self) -> None:
        self.agreed = False
        self.was_finished = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.was_finished = state.global_step >= state.max_steps
        if self.was_finished:
            longer = "max_steps" if args.max_steps > 0 else "num_train_epochs"
            warnings.warn(
                f"The checkpoint is the end of its run (optimizer step {state.global_step} of {state.max_steps}): "
                f"nothing is trained. Write a larger {longer}.",
                stacklevel=2,
            )

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.agreed:
            control.should_save, control.should_training_stop = True, True
            control.should_evaluate = False  # who sends SIGTERM waits for seconds, not for an evaluation

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.agreed or self.was_finished:  # transformers passes here on its way out, and it is all saved
            control.should_save, control.should_evaluate = False, False


def _say(text: str) -> None:
    with suppress(OSError):  # who read it may be gone
        print(text, file=sys.stderr, flush=True)


@contextmanager
def _noting_sigterm(note: Callable[[], None]) -> Iterator[None]:
    """Call `note` on the first SIGTERM; one that comes some time later ends the process as ever."""
    before = signal.getsignal(signal.SIGTERM)
    received: list[float] = []

    def handle(number: int, frame: Any) -> None:
        received.append(time.monotonic())
        if len(received) == 1:
            _say("SIGTERM: a checkpoint follows once all processes have done this optimizer step.")
            note()
        elif received[-1] - received[0] > _SECONDS_OF_ONE_REQUEST:
            signal.signal(signal.SIGTERM, before)
            os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class ResumableTrainer(WindowedTrainer):
    """Writes checkpoints from which a run goes on exactly, and ends with one on SIGTERM."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._check_optimizer_can_be_loaded()
        self._stop = _StopCallback()
        self.add_callback(self._stop)
        self._sigterm = False
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._stopped_by = "SIGTERM"
        self._not_loaded: list[str] = []
        if self.accelerator.num_processes > 1:
            let_gloo_finish()

    @property
    def _saves(self) -> bool:
        """Whether there are checkpoints, and so one on SIGTERM. The same on all ranks."""
        return SaveStrategy(self.args.save_strategy) != SaveStrategy.NO

    def _check_optimizer_can_be_loaded(self) -> None:
        """Refuse what torch fails at when the run is resumed."""
        plugin = self.accelerator.state.fsdp_plugin if self.is_fsdp_enabled else None
        whole = plugin is not None and plugin.fsdp_version == 2 and plugin.state_dict_type.name == "FULL_STATE_DICT"
        stateless = self.args.optim == "sgd" and "momentum" not in str(self.args.optim_args)
        if whole and stateless and self._saves and not self.args.save_only_model:
            allowed = "under FSDP2 torch cannot load an optimizer that keeps no state, so the run could not be resumed"
            raise refusal("optim", "sgd", allowed, "optim_args='momentum=0.9'")

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> Any:
        """As in transformers, from a whole checkpoint only. On SIGTERM, or when its launcher has died, it saves one
        and exits.

        Raises:
            ValueError: the checkpoint is not whole, or was made with another setup.
            SystemExit: with code 143, after such a stop.
        """
        self._sigterm, self._stop.agreed, self._stop.was_finished = False, False, False
        self._stopped_by = "SIGTERM"
        checkpoint = self._agreed_checkpoint(resume_from_checkpoint)
        # A resumed run has had its evaluation at the start.
        start = {"eval_on_start": False} if checkpoint is not None else {}
        handled = self._saves and threading.current_thread() is threading.main_thread()
        with temporarily(self.args, **start), _noting_sigterm(self._note_sigterm) if handled else nullcontext():
            result = super().train(checkpoint, trial, ignore_keys_for_eval)
        if self._stop.agreed:
            if self.accelerator.is_main_process:
                saved = self._checkpoint_dir()
                _say(
                    f"Stopped by {self._stopped_by} after {self.state.global_step} optimizer steps, all saved in "
                    f"{saved}. Go on with `resume_from_checkpoint={str(saved)!r}`, or `true` for the newest."
                )
            self.end()
            sys.exit(SIGTERM_EXIT_CODE)
        return result

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers. A run that was stopped is not at its end: it needs its last checkpoint, which
        transformers would delete for the best one, and its own weights."""
        unfinished = {"load_best_model_at_end": False, "save_total_limit": None} if self._stop.agreed else {}
        with temporarily(self.args, **unfinished):
            return super()._finalize_training(*args, **kwargs)

    def _note_sigterm(self) -> None:
        self._sigterm = True

    def _note_orphaned(self) -> None:
        """Torch's launcher takes no process with it when it is killed. One that went on would write to the same
        `output_dir` as the run that is resumed."""
        if self._launcher not in (None, os.getppid()) and not self._sigterm:
            self._sigterm, self._stopped_by = True, "the end of its launcher"
            _say("The launcher has ended: a checkpoint follows once all processes have done this optimizer step.")

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, Tensor | int | None]:
        """None for a run that was finished when it was resumed. transformers would take one more step."""
        if self._stop.was_finished:
            self.control.should_training_stop = True
            return [], None
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        if self._saves:
            self._note_orphaned()
            # carried by the reduction of the metrics, to cost no collective of its own
            asked = torch.tensor(float(self._sigterm), device=self.accelerator.device)
            self._accumulators["train"].add_mean("_stop", asked)
        return loss

    def _agree_to_stop(self, window: dict[str, Tensor]) -> None:
        """Stop after this step if any process was asked to."""
        if "sum:_stop" in window:
            self._stop.agreed = window["sum:_stop"].item() > 0

    def _agreed_checkpoint(self, asked: str | bool | None) -> str | None:
        """What the main process finds, checked against this run, on all ranks."""
        found: list[Any] = [None, None]
        if self.accelerator.is_main_process:
            try:
                found[0] = checkpoint_to_resume(self.args.output_dir, asked)
            except ValueError as error:
                found[1] = str(error)
        broadcast_object_list(found)
        checkpoint, refused = found
        if refused is not None:
            raise ValueError(refused)
        if checkpoint is not None:
            self.check_resumable(checkpoint)
        return checkpoint

    def check_resumable(self, checkpoint: str) -> None:
        """Refuse a checkpoint that another setup made.

        Raises:
            ValueError: with what differs.
        """
        check_setup(read_marker(checkpoint)["setup"], self._setup(), checkpoint)

    def _setup(self) -> dict[str, Any]:
        setup = setup_of(self.args, self.train_dataset, self.reward_func_names, engine_of(self.accelerator))
        return json.loads(json.dumps(without_secrets(setup), default=str))  # as it comes back from a file

    # Saving

    def _checkpoint_dir(self, trial: Any = None) -> Path:
        return Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """As in transformers, but nothing old is deleted and nothing pushed before the new checkpoint is whole."""
        directory = self._checkpoint_dir(trial)
        try:
            self._write_checkpoint(model, trial, directory)
        except Exception as error:
            newest, _ = newest_complete(directory.parent)
            free = shutil.disk_usage(directory.parent).free / 1e9
            error.add_note(
                f"{directory} could not be written ({free:.3g} GB are free there). The newest whole checkpoint is "
                f"{newest}."
            )
            raise
        if self.args.push_to_hub:
            self._warn_of_failed_pushes()
            self._push_from_checkpoint(str(directory))
        if self.args.should_save:
            rotate_checkpoints(
                output_dir=str(directory.parent),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )

    def _write_checkpoint(self, model: Any, trial: Any, directory: Path) -> None:
        exact = not self.args.save_only_model
        if self.accelerator.is_local_main_process:
            mark_incomplete(directory)
        self.accelerator.wait_for_everyone()
        with temporarily(self.args, save_total_limit=None, push_to_hub=False):
            super()._save_checkpoint(model, trial)
        if exact:
            directory.mkdir(parents=True, exist_ok=True)
            save_state(directory, self.accelerator.process_index, self._run_state())
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_local_main_process:
            mark_complete(directory, exact=exact, setup=self._setup())
        self.accelerator.wait_for_everyone()

    def _finish_current_push(self) -> None:
        super()._finish_current_push()
        self._warn_of_failed_pushes()

    def _warn_of_failed_pushes(self) -> None:
        """Checkpoints are pushed in the background, where transformers keeps errors to itself."""
        push = getattr(self, "push_in_progress", None)
        if push is None:
            return
        done = [job for job in push.jobs if job.done()]
        push.jobs = [job for job in push.jobs if job not in done]
        for error in [job.exception() for job in done if not job.cancelled()]:
            if error is not None:
                warnings.warn(
                    f"A push to {self.hub_model_id} in the background failed ({type(error).__name__}: {error}). "
                    "Training goes on; what was not pushed is on disk.",
                    stacklevel=2,
                )

    def _run_state(self) -> dict[str, Any]:
        """What this process needs beside model, optimizer, schedule and random numbers, between two windows."""
        block, _ = self._locate(self._step)
        unfinished = self._step % self.args.batch_plan().micro_steps_per_generation != 0
        return {
            "step": self._step,
            "block": self._blocks[block] if unfinished else None,
            "metrics": dict(self._metrics["train"]),
            "accumulated": self._accumulators["train"].state(),
            "reference": self._reference_weights() if self._saves_reference else None,
        }

    # Loading

    def _load_from_checkpoint(self, checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(checkpoint, model)
        self._load_what_was_renamed(checkpoint)

    def _load_best_model(self) -> None:
        best = str(self.state.best_model_checkpoint)
        sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        if is_adapter_model(self.model) and not sharded:
            # transformers looks for the adapter called `default` only. One of another name is in its own directory.
            self._load_from_checkpoint(best)
        else:
            super()._load_best_model()
            self._load_what_was_renamed(best)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Noted: where transformers warns of names and goes on without the weights, they are loaded otherwise."""
        self._not_loaded = names_not_loaded(cast(Any, self.model), load_result)

    def _load_what_was_renamed(self, directory: str) -> None:
        if self._not_loaded:
            load_converted(self.model, directory)
        self._not_loaded = []

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._restore(checkpoint)

    def _restore(self, checkpoint: str) -> None:
        """Take up the state of this process before anything is generated."""
        inexact = None
        if not read_marker(checkpoint)["exact"]:
            inexact = "it was saved with save_only_model=True, so optimizer, schedule and rollouts begin anew"
        elif self.args.ignore_data_skip:
            inexact = "ignore_data_skip=True begins the epoch's prompts again, and new rollouts with them"
        elif not isinstance(self.train_dataset, Sized) and (self.state.epoch or 0) >= 1:
            inexact = "train_dataset is a stream that had been read to its end, and goes on from elsewhere"
        if inexact is not None:
            warnings.warn(f"Resuming from {checkpoint} is not exact: {inexact}.", stacklevel=2)
        if not read_marker(checkpoint)["exact"] or self.args.ignore_data_skip:
            return
        state = load_state(checkpoint, self.accelerator.process_index, self.accelerator.device)
        self._step = state["step"]
        block, _ = self._locate(self._step)
        self._blocks = {} if state["block"] is None else {block: state["block"]}
        for name, values in state["metrics"].items():
            self._metrics["train"][name] = values
        self._accumulators["train"].load_state(state["accumulated"])
        weights = state["reference"]
        if self._saves_reference:
            if weights is None:
                weights = load_state(checkpoint, 0, self.accelerator.device)["reference"]
            self._set_reference_weights(weights)

    # A reference model that follows the policy (`sync_ref_model`) is part of the state.

    @property
    def _saves_reference(self) -> bool:
        return bool(self.args.sync_ref_model) and self.ref_model is not None

    def _reference_weights(self) -> dict[str, Tensor] | None:
        """What this rank holds of it; None where the first one holds the same."""
        sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        if not sharded and not self.accelerator.is_main_process:
            return None
        return {name: _held(parameter) for name, parameter in cast(Any, self.ref_model).named_parameters()}

    @torch.no_grad()
    def _set_reference_weights(self, weights: dict[str, Tensor]) -> None:
        for name, parameter in cast(Any, self.ref_model).named_parameters():
            _held(parameter).copy_(weights[name])


def _held(parameter: Any) -> Tensor:
    """What this rank holds of a parameter: its shard under FSDP2 and ZeRO-3, all of it elsewhere."""
    if isinstance(parameter, DTensor):
        return parameter.to_local()
    return getattr(parameter, "ds_tensor", parameter.data)
