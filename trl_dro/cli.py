"""The `trl-dro` command: train, check a configuration, list the objectives, show the environment."""

import argparse
import math
import os
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import __version__


if TYPE_CHECKING:
    from .config import DROConfig
    from .rollout_correction import RolloutCorrection

# What a shell reports for a command that ended like this.
_INTERRUPTED, _BROKEN_PIPE = 130, 141

# Imports are inside functions throughout: `trl-dro --version` must not wait for torch.

_TRAIN_HELP = """\
usage: trl-dro train --config X.yaml [--accelerate_config NAME|PATH] [--OPTION VALUE ...]

Trains. Options on the command line win over the file. Without --accelerate_config, or another option of
`accelerate launch` such as --num_processes, training runs in this process.
"""
_CHECK_HELP = """\
usage: trl-dro check --config X.yaml [--accelerate_config NAME|PATH] [--OPTION VALUE ...]

Checks a configuration and prints what it comes to, without loading a model. Takes what `trl-dro train` takes.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `trl-dro`.

    Args:
        argv: The command line, `sys.argv[1:]` if left out.

    Returns:
        The exit code: 0, 1 after an error in a configuration or in training, 130 after an interrupt, 141 if nobody
        reads the output any more.

    Raises:
        SystemExit: With code 2, for a bad command line.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="trl-dro", description=__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"trl-dro {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (_, text) in _COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    command = parser.parse_args(argv[:1]).command
    try:
        code = _COMMANDS[command][0](argv[1:])
        sys.stdout.flush()  # Python would do it after the last chance to handle an error
        return code
    except BrokenPipeError:  # the reader had enough, as in `trl-dro check | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except (ValueError, ImportError) as error:
        print(f"trl-dro {command}: error: {error}", file=sys.stderr)
        return 1


def train(argv: list[str]) -> int:
    """`trl-dro train`: check the configuration, then train here or through `accelerate launch`.

    Raises:
        ValueError: If the configuration is bad. Nothing has been launched then.
    """
    from .checks import check_args
    from .train import EXPECTED_PROCESSES, run
    from .train_arguments import make_parser, parse, parse_loudly

    if not argv or "-h" in argv or "--help" in argv:
        print(_TRAIN_HELP if not argv else f"{_TRAIN_HELP}\n{make_parser('trl-dro train').format_help()}")
        return 0 if argv else 2
    own, launch = _split_launch_options(argv, make_parser("trl-dro train"))
    if not launch:
        arguments = parse_loudly(own, prog="trl-dro train")
        try:
            return run(*arguments)
        except KeyboardInterrupt as interrupt:
            # The notes say what is on disk, if any step was trained.
            print("\n" + " ".join(["Interrupted.", *getattr(interrupt, "__notes__", [])]), file=sys.stderr)
            return _INTERRUPTED
        except Exception:
            # Whatever fails from here on is not a matter of wording: show where, a reward function's error too.
            traceback.print_exc()
            return 1
    launch_args = _parse_launch_options("trl-dro train", launch, own)
    # A config leaves variables behind that the launched processes set themselves, and they will warn.
    with _environment_restored(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, config, *_ = parse(own, prog="trl-dro train", config_class=_config_for(_world_size(launch_args)))
        check_args(config, has_rollout_func=False)
    with _environment_restored():
        if launch_args.num_processes or launch_args.config_file:  # else accelerate counts the devices
            os.environ[EXPECTED_PROCESSES] = str(_world_size(launch_args))
        return _launch(launch_args)


def check(argv: list[str]) -> int:
    """`trl-dro check`: print the plan of a configuration.

    Raises:
        ValueError: If the configuration is bad.
    """
    from .train import check_output_dir
    from .train_arguments import make_parser, parse

    if not argv or "-h" in argv or "--help" in argv:
        print(_CHECK_HELP)
        return 0 if argv else 2
    own, launch = _split_launch_options(argv, make_parser("trl-dro check"))
    world_size = _world_size(_parse_launch_options("trl-dro check", launch, own)) if launch else 1
    with _environment_restored(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, config, model_args, _ = parse(own, prog="trl-dro check", config_class=_config_for(world_size))
        check_output_dir(config)
        lines = plan_lines(config, str(model_args.model_name_or_path))
    print("\n".join(lines))
    for warning in caught:
        if issubclass(warning.category, (UserWarning, FutureWarning)):
            print(f"\nwarning: {warning.message}")
    print("\nThe configuration is valid.")
    return 0


def plan_lines(config: "DROConfig", model: str) -> list[str]:
    """What a configuration comes to, as lines of text.

    Args:
        config: The configuration.
        model: Name of the model, to show.
    """
    plan = config.batch_plan()
    objective = config.build_policy_loss()
    updates = plan.windows_per_generation
    prompts = _count(plan.prompts_per_generation, "prompt")
    rows = [
        ("model", f"{model} (not loaded)"),
        ("objective", f"{objective!r}, anchor_policy {config.anchor_policy}, loss_agg_mode {config.loss_agg_mode}"),
        (
            "optimizer step",
            f"{plan.rows_per_window} rows = {_count(plan.world_size, 'process', 'processes')} x "
            f"{plan.per_device_train_batch_size} per device x "
            f"{_count(plan.gradient_accumulation_steps, 'accumulation step')}",
        ),
        (
            "generation batch",
            f"{plan.rows_per_generation} rows = {prompts} x {plan.num_generations} "
            f"completions ({_count(plan.steps_per_generation, 'micro-step')}, used {plan.num_iterations}x)",
        ),
        ("updates", f"{updates:g} optimizer step{'' if updates == 1 else 's'} on each generation batch"),
        ("staleness", f"at most {_count(plan.max_staleness, 'optimizer step')} since the policy that sampled"),
    ]
    if config.is_dro:
        alive = "alive" if plan.penalty_alive else "dead: the log-ratio is always 0, this is REINFORCE"
        rows.append(("penalty", alive))
    correction = config.build_rollout_correction()
    if correction is not None:
        rows.append(("correction", "; ".join(_correction(correction))))
    if config.advantage_baseline != "mean":
        rows.append(("baseline", _baseline(config, objective)))
    width = max(len(label) for label, _ in rows)
    lines = [f"{label:<{width}}  {text}" for label, text in rows]
    return [*lines, "", *_resting_points(objective), *_about_beta(config, objective)] if config.is_dro else lines


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _resting_points(objective: Any) -> list[str]:
    """Where DRO's pull vanishes, l* = A / beta, for three sizes of advantage."""
    what = "token" if objective.level == "token" else "whole completion"
    lines = [
        f"a {what} comes to rest at l* = A / beta, with beta = {objective.beta:g}:",
        "  |A|    l*        probability x",
    ]
    for advantage in (0.5, 1.0, 2.0):
        rest = advantage / objective.beta
        ratio = f"{math.exp(rest):.4g}" if rest < 50 else "> 1e21"
        if objective.huber_delta is not None and rest > objective.huber_delta:
            rest, ratio = math.inf, "without bound: beyond dro_huber_delta the pull no longer grows"
        lines.append(f"  {advantage:<5g}  {rest:<8.4g}  {ratio}")
    return lines


def _about_beta(config: "DROConfig", objective: Any) -> list[str]:
    """What beta would be at the other level, and what it is adapted to."""
    lines = []
    length = config.max_completion_length
    if length is not None:
        token = objective.level == "token"
        other = objective.beta / length if token else objective.beta * length
        lines.append(
            f"about the same at dro_level='{'sequence' if token else 'token'}': dro_beta = "
            f"{objective.beta:g} {'/' if token else '*'} length, {other:.3g} for completions of {length} tokens"
        )
    if config.dro_target_kl is not None:
        lines.append(f"dro_beta is adapted from there to a mean l^2 / 2 of {config.dro_target_kl:g}")
    return lines


def _correction(correction: "RolloutCorrection") -> Iterator[str]:
    if correction.level is not None:
        low, high = correction.threshold_lower, correction.threshold
        bounds = f"cut to {high:g}" if low is None else f"zero outside [{low:g}, {high:g}]"
        yield f"{correction.level} weights, {bounds}{', normalised' * correction.batch_normalize}"
    for one in correction.rejections:
        low, high = one.threshold_lower, one.threshold
        yield f"rejects {one.statistic} " + (
            f"above {high:g}" if low is None else f"outside engine / trainer ratios [{low:g}, {high:g}]"
        )


def _baseline(config: "DROConfig", objective: Any) -> str:
    if config.advantage_baseline != "soft":
        return config.advantage_baseline
    if config.advantage_baseline_temperature is not None:
        return f"soft, temperature {config.advantage_baseline_temperature:g}"
    per_token = " / mean completion length" if objective.level == "token" else ""
    return f"soft, temperature dro_beta{per_token}"


def losses(argv: list[str]) -> int:
    """`trl-dro losses`: the table of policy objectives."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from .policy_loss import list_policy_losses, policy_loss_aliases, policy_loss_parameters, resolve_policy_loss

    argparse.ArgumentParser(prog="trl-dro losses", description=losses.__doc__, allow_abbrev=False).parse_args(argv)
    table = Table("name", "aliases", "parameters", "what it is", box=None, pad_edge=False)
    for name in list_policy_losses():
        cls = resolve_policy_loss(name)
        parameters = [
            f"{row.name}={row.default}" if row.default != "required" else f"{row.name} (required)"
            for row in policy_loss_parameters(cls)
        ]
        summary = (cls.__doc__ or "").strip().split("\n")[0]
        table.add_row(name, ", ".join(policy_loss_aliases(name)), "\n".join(parameters), escape(summary))
    # Piped output has no width of its own; 80 columns would break every cell.
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    return 0


def env(argv: list[str]) -> int:
    """`trl-dro env`: versions, for reporting an issue."""
    from trl.scripts.env import print_env

    argparse.ArgumentParser(prog="trl-dro env", description=env.__doc__, allow_abbrev=False).parse_args(argv)
    print_env()
    print(f"- trl-dro version: {__version__}")
    return 0


_COMMANDS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "train": (train, "train with a configuration file"),
    "check": (check, "check a configuration without loading a model, and print the plan"),
    "losses": (losses, "list the policy objectives and their parameters"),
    "env": (env, "print versions, for reporting an issue"),
}


def accelerate_config_path(name: str) -> Path:
    """The file that `--accelerate_config` means.

    Args:
        name: A path, or the name of a file that comes with this package, without `.yaml`.

    Raises:
        ValueError: If it is neither; the message lists the names.
    """
    if Path(name).is_file():
        return Path(name)
    package = Path(__file__).parent
    # Installed, the files are inside the package; in a checkout, next to it.
    shipped: dict[str, Path] = {}
    for folder in (package.parent / "accelerate_configs", package / "accelerate_configs"):
        shipped |= {file.stem: file for file in sorted(folder.glob("*.yaml"))}
    if name not in shipped:
        raise ValueError(
            f"--accelerate_config {name} is neither a file nor one of the names {', '.join(sorted(shipped))}."
        )
    return shipped[name]


def _split_launch_options(argv: list[str], parser: argparse.ArgumentParser) -> tuple[list[str], list[str]]:
    """The command line in two: what the training script understands, and what only `accelerate launch` does."""
    from accelerate.commands.launch import launch_command_parser

    from .parsing import suggest

    own_names = {*parser._option_string_actions, "--config"}
    launch_names = {*launch_command_parser()._option_string_actions, "--accelerate_config"} - own_names
    own: list[str] = []
    launch: list[str] = []
    target = own
    for token in argv:
        if token.startswith("--"):
            name = token.partition("=")[0]
            if name not in own_names | launch_names:
                near = suggest(name, own_names | launch_names)
                parser.error(f"unknown option {name}.{near} `--help` lists all options.")
            target = launch if name in launch_names else own
        target.append(token)
    return own, launch


def _parse_launch_options(prog: str, launch: list[str], own: list[str]) -> argparse.Namespace:
    """Arguments for `accelerate launch` on our training script."""
    from accelerate.commands.launch import launch_command_parser

    picker = argparse.ArgumentParser(prog=prog, add_help=False, allow_abbrev=False)
    picker.add_argument("--accelerate_config")
    picked, rest = picker.parse_known_args(launch)
    if picked.accelerate_config is not None:
        rest = ["--config_file", str(accelerate_config_path(picked.accelerate_config)), *rest]
    parser = launch_command_parser()
    parser.prog, parser.usage = prog, f"{prog} --config X.yaml [--accelerate_config NAME|PATH] [--OPTION VALUE ...]"
    arguments = parser.parse_args([*rest, "-m", "trl_dro.train", *own])
    if arguments.training_script != "trl_dro.train":  # a stray value went where the script's name belongs
        parser.error(f"unexpected argument {arguments.training_script!r}")
    return arguments


def _world_size(launch_args: argparse.Namespace) -> int:
    """How many processes `accelerate launch` would start."""
    from accelerate.commands.config import default_config_file, load_config_from_file

    if launch_args.num_processes:
        return launch_args.num_processes
    path = launch_args.config_file or (default_config_file if os.path.isfile(default_config_file) else None)
    size = load_config_from_file(path).num_processes if path else 1
    return size if size and size > 0 else 1


def _config_for(world_size: int) -> type["DROConfig"]:
    """`DROConfig` as the processes of a launch will see it: batch sizes depend on their number."""
    from .config import DROConfig

    class PlannedConfig(DROConfig):
        @property
        def world_size(self) -> int:
            return world_size

        @property
        def announced_world_size(self) -> int:
            return world_size

    return PlannedConfig if world_size > 1 else DROConfig


@contextmanager
def _environment_restored() -> Iterator[None]:
    saved = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)


def _launch(launch_args: argparse.Namespace) -> int:
    import psutil
    from accelerate.commands.launch import launch_command
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    def pass_on(number: int, frame: object) -> None:
        for process in psutil.Process().children():
            process.send_signal(number)

    # For a single process accelerate waits without passing on what it gets. For several, torch has its own handler.
    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        launch_command(launch_args)
    except (subprocess.CalledProcessError, ChildFailedError) as error:
        if isinstance(error, subprocess.CalledProcessError) and error.returncode == 128 + signal.SIGTERM:
            return error.returncode  # it has saved, and said so
        # The processes have printed what went wrong; a traceback through the launcher would bury it.
        print(f"trl-dro train: error: a training process failed ({type(error).__name__}).", file=sys.stderr)
        return 1
    except SignalException as stopped:  # its processes have had time to save, and have said so
        return 128 + stopped.sigval
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


if __name__ == "__main__":
    sys.exit(main())
