"""What a model card says of a run, in addition to TRL's card: objective, settings, learning curve, recipe.

Everything here is a function of values, and cheap: the card is written again with every checkpoint.
"""

import dataclasses
import inspect
import math
import pprint
import re
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import yaml
from huggingface_hub import ModelCard

from . import __version__
from .config_rules import field_defaults
from .off_policy_rules import CORRECTION_FIELDS
from .redaction import without_places, without_secrets


if TYPE_CHECKING:
    from .config import DROConfig


# Rows of the learning curve.
MOST_ROWS = 12

# Fields that say where a run was made and how it was watched, not what came out; and those that transformers fills in.
_LEFT_OUT = {
    "accelerator_config",
    "dataloader_pin_memory",
    "debug",
    "derived_fields",
    "disable_tqdm",
    "do_train",
    "local_rank",
    "log_completions_hub_repo",
    "output_dir",
    "pad_to_multiple_of",
    "project",
    "push_to_hub",
    "report_to",
    "resume_from_checkpoint",
    "run_name",
    "trackio_bucket_id",
    "trackio_space_id",
    "trackio_static_space_id",
    "vllm_server_base_url",
    "vllm_server_host",
    "vllm_server_port",
}

_ABOUT_DRO = """\
Direct Reward Optimization (DRO): policy gradient with a quadratic penalty on the log-ratio `l` to an anchor policy,

    -(A · logp - dro_beta/2 · l²)

so that a token of advantage `A` comes to rest where `l = A / dro_beta`. Here it is online, with a baseline taken from
the completions of the same prompt in place of a value model: the same quadratic as in
[Kimi k1.5](https://huggingface.co/papers/2501.12599)."""

_ANCHORS = {
    "old": "old: the policy that generated, scored by the trainer",
    "sampling": "sampling: the policy that generated, as scored by the inference engine",
    "reference": "reference: the reference model",
}


def extend(
    card: ModelCard,
    section: str,
    *,
    model_name: str | None,
    adapter: str | None = None,
    has_chat_template: bool = True,
) -> None:
    """Put a section into TRL's card, and mend what its template gets wrong.

    Args:
        card: as TRL makes it.
        section: markdown.
        model_name: what to load in the example, for a model that is on no Hub.
        adapter: kind of an adapter, such as `lora`.
        has_chat_template: whether the model can answer messages, as the example does.
    """
    text = card.text.replace("[None](https://huggingface.co/None)", "a model that was not taken from the Hub")
    text = text.replace('model="None"', f'model="{model_name}"')
    if not has_chat_template:
        text = text.replace('[{"role": "user", "content": question}]', "question")
    versions = "### Framework versions\n\n"
    before, found, after = text.partition(versions)
    card.text = f"{before.rstrip()}\n\n{section}\n\n{found}{found and f'- trl_dro: {__version__}'}\n{after}"
    data: Any = card.data
    tags = set(data.tags or [])
    if adapter is not None:
        data.library_name = "peft"
        tags.add(adapter)
    data.tags = sorted(tags)  # TRL's come in another order each time


def describe(
    args: "DROConfig",
    log_history: Sequence[Mapping[str, Any]] = (),
    *,
    objective: Any = None,
    dro_beta: float | None = None,
    recipe: str | None = None,
    best_step: int | None = None,
) -> str:
    """The section of a card about a run, finished or not.

    Args:
        args: the configuration.
        log_history: logs of training and evaluation, as in `TrainerState`.
        objective: the policy objective, built from `args` if left out.
        dro_beta: its present value where it is adapted.
        recipe: the run as a configuration file of `trl-dro train`. Left out, the settings are shown as a `DROConfig`.
        best_step: the step that the weights are from, if it is not the last one.
    """
    objective = args.build_policy_loss() if objective is None else objective
    parts = [
        f"### Objective\n\n{_ABOUT_DRO if args.is_dro else _about(objective, args.policy_loss)}",
        _table(("setting", "value"), settings(args, objective, dro_beta)),
    ]
    curve = [_held_out(log_history), _curve(log_history)]
    if best_step is not None:
        metric = str(args.metric_for_best_model).removeprefix("eval_")
        curve.append(f"The weights are those of step {best_step}, the best by `eval_{metric}`.")
    if any(curve):
        parts += ["### Learning curve", *filter(None, curve)]
    if recipe is not None:
        parts += ["### Recipe", "A file for `trl-dro train --config`:", _block("yaml", recipe)]
    else:
        parts += ["### Recipe", _block("python", recipe_as_python(args))]
    return "\n\n".join(parts)


def settings(args: "DROConfig", objective: Any, dro_beta: float | None = None) -> list[tuple[str, str]]:
    """The settings that make a run what it is, as rows of name and value."""
    plan = args.batch_plan()
    rows: list[tuple[str, Any]] = [("policy_loss", args.policy_loss)]
    if args.is_dro:
        beta = f"{objective.beta:g}"
        if args.dro_target_kl is not None:
            first = args.build_policy_loss().beta  # type: ignore[attr-defined]
            now = objective.beta if dro_beta is None else dro_beta
            beta = f"{first:g} at first, {now:.4g} now: adapted to a mean l² / 2 of {args.dro_target_kl:g}"
        rows += [("dro_beta", beta), ("dro_level", objective.level)]
        if objective.huber_delta is not None:
            rows.append(("dro_huber_delta", f"{objective.huber_delta:g}"))
    else:
        rows += list(without_secrets(_parameters(objective, args)).items())
    aggregation = args.loss_agg_mode
    if args.loss_scale_factor is not None:
        aggregation = f"{aggregation} with loss_scale_factor={args.loss_scale_factor:g}"
    rows += [
        ("anchor_policy", _ANCHORS[args.anchor_policy]),
        ("loss_agg_mode", aggregation),
        ("advantage_baseline", _baseline(args)),
        ("scale_rewards", args.scale_rewards),
        ("rollout correction", _correction(args)),
        ("optimizer steps on each generated batch", f"{plan.windows_per_generation:g}"),
        ("completions in an optimizer step", plan.rows_per_window),
        ("completions for each prompt", plan.num_generations),
        ("learning_rate", f"{args.learning_rate:g}"),
    ]
    if args.beta:
        rows.append(("beta (KL to the reference model)", f"{args.beta:g}"))
    return [(name, str(value)) for name, value in rows]


def recipe_fields(config: Any) -> dict[str, Any]:
    """The fields of a configuration that were given and matter to the result, without secrets and places.

    Args:
        config: a dataclass.
    """
    defaults = field_defaults(type(config))
    derived = getattr(config, "derived_fields", None) or {}
    given = {}
    for field in dataclasses.fields(config):
        name, value = field.name, getattr(config, field.name)
        if not field.init or name in _LEFT_OUT or name.startswith("hub_"):
            continue
        if value == defaults.get(name) or (name in derived and derived[name] == value):
            continue
        plain = _plain(value)
        if plain is not _NOT_PLAIN:
            given[name] = without_places(without_secrets(plain, name))
    return given


def recipe_as_yaml(*configs: Any) -> str:
    """A configuration file of `trl-dro train`, out of its dataclasses."""
    fields = {name: value for config in configs for name, value in recipe_fields(config).items()}
    return yaml.safe_dump(fields, sort_keys=False, allow_unicode=True, width=119)


def recipe_as_python(config: "DROConfig") -> str:
    """The call that makes a configuration."""
    lines = [f"    {name}={pprint.pformat(value, width=100)}," for name, value in recipe_fields(config).items()]
    return "\n".join(["DROConfig(", *lines, ")"])


_NOT_PLAIN = object()


def _plain(value: Any) -> Any:
    """As texts, numbers, lists and dicts; `_NOT_PLAIN` for what is none of these."""
    if isinstance(value, Enum):
        return _plain(value.value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if isinstance(value, dict):
        items = {str(key): _plain(item) for key, item in value.items()}
        return {key: item for key, item in items.items() if item is not _NOT_PLAIN}
    if isinstance(value, (list, tuple)):
        return [item for item in map(_plain, value) if item is not _NOT_PLAIN]
    return value if value is None or isinstance(value, (bool, int, float, str)) else _NOT_PLAIN


def _about(objective: Any, name: str) -> str:
    """An objective other than DRO, in the words and with the papers of its docstring."""
    documentation = inspect.getdoc(type(objective)) or ""
    summary = documentation.split("\n\n")[0].replace("\n", " ")
    papers = dict.fromkeys(re.findall(r"arxiv\.org/abs/(\d{4}\.\d{4,5})", documentation))
    links = ", ".join(f"[{paper}](https://huggingface.co/papers/{paper})" for paper in papers)
    return f"`{name}`{f': {summary}' if summary else ''}{f' Papers: {links}.' if links else ''}"


def _parameters(objective: Any, args: "DROConfig") -> dict[str, Any]:
    if dataclasses.is_dataclass(objective):
        return {field.name: getattr(objective, field.name) for field in dataclasses.fields(objective) if field.init}
    return dict(args.policy_loss_kwargs or {})  # type: ignore[arg-type]  # read from JSON by the configuration


def _baseline(args: "DROConfig") -> str:
    if args.advantage_baseline_temperature is None:
        return args.advantage_baseline
    return f"{args.advantage_baseline}, temperature {args.advantage_baseline_temperature:g}"


def _correction(args: "DROConfig") -> str:
    defaults = field_defaults(type(args))
    if args.build_rollout_correction() is not None:
        given = {name: getattr(args, name) for name in CORRECTION_FIELDS if getattr(args, name) != defaults[name]}
        return ", ".join(f"{name}={value!r}" for name, value in given.items())
    if args.use_vllm and args.vllm_importance_sampling_correction:
        return f"TRL's, {args.vllm_importance_sampling_mode}"
    return "none"


def _held_out(log_history: Sequence[Mapping[str, Any]]) -> str:
    """First and last held-out reward of every evaluated dataset."""
    found: dict[str, list[tuple[int, Any]]] = {}
    for logs in log_history:
        for name in logs:
            if name.endswith("_reward") and f"{name}_std" in logs:
                found.setdefault(name, []).append((logs.get("step", 0), logs[name]))
    lines = []
    for name, scores in found.items():
        ends = [scores[0], scores[-1]] if len(scores) > 1 else scores
        lines.append(f"Held-out `{name}`: {', '.join(f'{_number(score)} at step {step}' for step, score in ends)}.")
    return "\n\n".join(lines)


def _curve(log_history: Sequence[Mapping[str, Any]]) -> str:
    """Reward and distance to the anchor, each row the mean since the row above."""
    # A reward is logged when completions are scored, and the steps after it use them: they stay together.
    batches: list[list[Mapping[str, Any]]] = []
    for logs in log_history:
        if "reward" in logs:
            batches.append([logs])
        elif batches and "dro/kl_k2" in logs:
            batches[-1].append(logs)
    if not batches:
        return ""
    count = min(len(batches), MOST_ROWS)
    edges = [round(index * len(batches) / count) for index in range(count + 1)]
    chunks = [list(chain(*batches[first:last])) for first, last in pairwise(edges)]
    logged = set(chain(*chain(*batches)))
    names = [name for name in ("reward", "dro/kl_k2", "dro/beta", "kl") if name in logged]
    rows = [
        [str(chunk[-1].get("step", "")), *(_number(_mean(logs.get(name) for logs in chunk)) for name in names)]
        for chunk in chunks
    ]
    return _table(("up to step", *names), rows)


def _mean(values: Iterable[Any]) -> float | None:
    """Of those that are there."""
    there = [value for value in values if isinstance(value, (int, float)) and not math.isnan(value)]
    return sum(there) / len(there) if there else None


def _number(value: Any) -> str:
    there = isinstance(value, (int, float)) and not math.isnan(value)
    return f"{value:.4g}" if there else "none"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _block(language: str, text: str) -> str:
    """A code block, behind a fence that the text cannot close."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"
