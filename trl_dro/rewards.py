"""Reward functions that TRL lacks, and how rewards are looked up by name."""

import difflib
import importlib
import logging
import os
import re
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from .tasks import entry_from_json


logger = logging.getLogger(__name__)

Reward = Callable[..., Any]

_THINKING = re.compile(r"^\s*(<think>)?.*?</think>", flags=re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", flags=re.DOTALL)
_NUMBER = re.compile(r"(?:(?<!\d)-)?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")  # the minus in "10-3" is an operator


def reasoning_gym_reward(completions: list[Any], entry: list[str], task: list[str], **kwargs: Any) -> list[float]:
    """Score completions with the verifier of their reasoning-gym task.

    A `<think>...</think>` block is dropped, and the last `<answer>...</answer>` is taken where there is one. Many
    verifiers give partial credit; `reasoning_gym_solved` does not.

    Args:
        completions: Strings, or lists of chat messages.
        entry: JSON of each row's entry, as in the datasets of `trl_dro.tasks.build_task`.
        task: Each row's generator.
        **kwargs: Other columns, unused.

    Returns:
        Scores, mostly from 0 to 1.
    """
    return [
        _score(extract_answer(completion), text, name)
        for completion, text, name in zip(completions, entry, task, strict=True)
    ]


def reasoning_gym_solved(completions: list[Any], entry: list[str], task: list[str], **kwargs: Any) -> list[float]:
    """1.0 where `reasoning_gym_reward` gives full marks, else 0.0. With a reward weight of 0 it is only a metric."""
    return [float(score >= 1.0) for score in reasoning_gym_reward(completions, entry, task)]


def reasoning_gym_final_number(
    completions: list[Any], entry: list[str], task: list[str], **kwargs: Any
) -> list[float]:
    """1.0 where the last number of the answer gets full marks from the row's verifier, else 0.0.

    For tasks whose answer is a number, and models that answer in a sentence. Thousands may have commas.
    """
    numbers = [_NUMBER.findall(extract_answer(completion)) for completion in completions]
    answers = [found[-1].replace(",", "") if found else "" for found in numbers]
    return reasoning_gym_solved(answers, entry, task)


def extract_answer(completion: str | list[dict[str, Any]]) -> str:
    """The answer in a completion: its last message, without the thinking and the tags around the answer."""
    text = completion if isinstance(completion, str) else str(completion[-1]["content"] or "") if completion else ""
    text = _THINKING.sub("", text)
    tagged = _ANSWER.findall(text)
    return (tagged[-1] if tagged else text).strip()


@cache
def _verifier(task: str) -> Callable[[str, dict[str, Any]], float]:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ImportError("`reasoning_gym_reward` needs reasoning-gym: `pip install trl-dro[tasks]`.") from error
    return reasoning_gym.get_score_answer_fn(task)


def _score(answer: str, entry: str, task: str) -> float:
    verifier, parsed = _verifier(task), entry_from_json(entry)
    try:
        return float(verifier(answer, parsed))
    except Exception as error:  # some verifiers raise on answers that they cannot parse
        logger.debug("Verifier of %s failed on %r: %s", task, answer, error)
        return 0.0


def _registry() -> dict[str, Callable[[], Reward]]:
    """Rewards by name, each behind a function, so that TRL's are imported only when used."""

    def from_trl(name: str) -> Reward:
        return getattr(importlib.import_module("trl.rewards"), name)

    return {
        "reasoning_gym_reward": lambda: reasoning_gym_reward,
        "reasoning_gym_solved": lambda: reasoning_gym_solved,
        "reasoning_gym_final_number": lambda: reasoning_gym_final_number,
        # The names, and the parameters of the last, are those of TRL's own script.
        "accuracy_reward": lambda: from_trl("accuracy_reward"),
        "reasoning_accuracy_reward": lambda: from_trl("reasoning_accuracy_reward"),
        "think_format_reward": lambda: from_trl("think_format_reward"),
        "get_soft_overlong_punishment": lambda: from_trl("get_soft_overlong_punishment")(
            max_completion_len=1280, soft_punish_cache=256
        ),
    }


def load_reward(name: str) -> Reward:
    """Find a reward function.

    Args:
        name: A name of ours or of TRL's GRPO script, or a dotted path such as `my_rewards.length_penalty`, looked up
            in the installed packages and in the working directory.

    Raises:
        ValueError: If there is no such name, module or function. The nearest name comes first.
    """
    registry = _registry()
    if name in registry:
        return registry[name]()
    if "." not in name:
        near = difflib.get_close_matches(name, registry, n=len(registry), cutoff=0.0)
        raise ValueError(
            f"reward_funcs: {name!r} is not a known reward. Known: {', '.join(near)}; or a dotted path, such as "
            "`my_rewards.my_function`."
        )
    module_name, _, attribute = name.rpartition(".")
    if os.getcwd() not in sys.path:  # last, so that nothing installed is shadowed
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"reward_funcs: {name!r}: cannot import `{module_name}` ({error}).") from error
    if not callable(getattr(module, attribute, None)):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        near = difflib.get_close_matches(attribute, functions, n=3, cutoff=0.3)
        raise ValueError(
            f"reward_funcs: `{module_name}` has no function {attribute!r}. Nearest: {', '.join(near) or 'none'}."
        )
    return getattr(module, attribute)
