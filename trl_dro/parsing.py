"""Strict command-line and YAML parsing on top of TRL's parser: nothing is ignored in silence."""

import argparse
import dataclasses
import difflib
import json
import os
import re
import sys
import types
from collections.abc import Callable, Hashable, Iterable
from enum import Enum
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, cast, get_args, get_origin, get_type_hints

import yaml
from transformers.hf_argparser import string_to_bool
from trl import TrlParser


class _Bare(str):
    """A word without quotes that YAML 1.1 reads as true or false."""


class _StrictLoader(yaml.SafeLoader):
    """PyYAML's safe loader with YAML 1.2 scalars, duplicate keys being errors.

    YAML 1.1 reads `no` as False (so `eval_strategy: no` breaks), `010` as 8 and `1e-5` as text. Scalars left as text
    here get their type from the field they are meant for.
    """

    yaml_implicit_resolvers: dict = {}  # our own list: the inherited one has the YAML 1.1 patterns

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        """Build a mapping, refusing a key that is given twice."""
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                line = key_node.start_mark.line + 1
                raise ValueError(f"`{key}` is given twice (second time in line {line}): keep one of the two.")
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(0|[1-9][0-9]*)", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+", "-+.0123456789"),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+."),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", r"<<", "<"),
):
    _StrictLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first))


def _construct_text(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> str:
    text = str(loader.construct_scalar(node))
    bare = node.style is None and text.lower() in ("yes", "no", "on", "off")
    return _Bare(text) if bare else text


_StrictLoader.add_constructor("tag:yaml.org,2002:str", _construct_text)


def load_yaml(path: str | os.PathLike) -> dict[str, Any]:
    """Read a configuration file.

    Args:
        path: A YAML file that holds one mapping.

    Returns:
        The mapping.

    Raises:
        ValueError: If the file is missing, is not YAML, is not a mapping or gives a key twice.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path}: cannot read this file ({error}).") from error
    try:
        config = yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"--config {path}: not valid YAML: {error}") from error
    except ValueError as error:
        raise ValueError(f"--config {path}: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"--config {path}: the file must hold a mapping of `key: value` lines, not {config!r}.")
    return config


def suggest(name: str, known: Iterable[str]) -> str:
    """A half-sentence that names the nearest of the known names, empty when none is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.7)
    return f" Did you mean `{near[0]}`?" if near else ""


def _members(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a union, or the hint itself."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _describe(hint: Any) -> str:
    names = [
        "None"
        if member is type(None)
        else getattr(member, "__name__", str(member))
        if not get_args(member)
        else str(member)
        for member in _members(hint)
    ]
    return " or ".join(name.replace("typing.", "") for name in names)


def _matches(value: Any, hint: Any) -> bool:
    """Whether the value has this type already (a bool is no number here, and lists must match inside)."""
    if hint is Any:
        return True
    origin = get_origin(hint) or hint
    if origin is Literal:
        return any(value is arg or (type(value) is type(arg) and value == arg) for arg in get_args(hint))
    if not isinstance(origin, type) or not isinstance(value, origin):
        return False
    if isinstance(value, bool) and origin is not bool:
        return False
    return not isinstance(value, list) or all(_matches(item, arg) for arg in get_args(hint) for item in value)


def _to_int(value: Any) -> int:
    if isinstance(value, str) and re.fullmatch(r"[-+]?[0-9][0-9_]*", value):
        return int(value)
    number = _to_float(value)
    if not number.is_integer():
        raise ValueError
    return int(number)


def _to_float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError
    return float(value)


def _to_bool(value: Any) -> bool:
    return string_to_bool(str(value) if type(value) is int else value)


def _to_str(value: Any) -> str:
    # A float has lost how it was written (1.10), so guessing would be silent corruption.
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise ValueError
    return str(value)


def _to_none(value: Any) -> None:
    if value is not None and value != "None":
        raise ValueError


def _to_dict(value: Any) -> dict:
    value = json.loads(value) if isinstance(value, str) else value
    if not isinstance(value, dict):
        raise ValueError
    _refuse_ambiguous(value)
    return value


def _without_marks(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_marks(item) for item in value]
    return str(value) if isinstance(value, _Bare) else value


def _refuse_ambiguous(value: Any) -> None:
    """Refuse a bare `no` where no type says whether it is meant as false: other tools read it so, it is text here."""
    if isinstance(value, _Bare):
        meant = str(value).lower() in ("yes", "on")
        raise _ExplainedError(f"`{value}` is ambiguous here. Write {str(meant).lower()}, or quote it: '{value}'.")
    items = [*value.keys(), *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in items:
        _refuse_ambiguous(item)


_CONVERTERS: dict[Any, Callable[[Any], Any]] = {
    bool: _to_bool,
    int: _to_int,
    float: _to_float,
    str: _to_str,
    dict: _to_dict,
    type(None): _to_none,
}


_EXAMPLES: dict[type, str] = {
    bool: " Write true or false.",
    float: " Write a number, such as 0.5 or 1e-5.",
    int: " Write a whole number, such as 8.",
}


class _ExplainedError(ValueError):
    """A refusal inside a nested mapping, whose message must not be replaced by the outer field's."""


def _build(value: dict[str, Any], cls: Any) -> Any:
    """Build a nested dataclass (such as one entry of `datasets`) from a mapping."""
    hints = _field_hints(cls)
    for key in value:
        if key not in hints:
            raise _ExplainedError(f"unknown key `{key}` of {cls.__name__}.{suggest(str(key), hints)}")
    try:
        return cls(**{key: coerce(item, hints[key]) for key, item in value.items()})
    except (TypeError, ValueError) as error:
        raise _ExplainedError(f"{value!r} is not a valid {cls.__name__}: {error}") from error


def _convert(value: Any, hint: Any) -> Any:
    """Convert to one type that is not a union; ValueError or TypeError when it does not fit."""
    origin = get_origin(hint) or hint
    if origin is list:
        (item_hint,) = get_args(hint) or (Any,)
        return [coerce(item, item_hint) for item in (value if isinstance(value, list) else [value])]
    if origin in _CONVERTERS:
        return _CONVERTERS[origin](value)
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return _build(value, hint)
    if origin is Literal:
        return next(arg for arg in get_args(hint) if str(arg) == value)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(value).value
    raise ValueError


def coerce(value: Any, hint: Any) -> Any:
    """Give a value the type that its field declares.

    Args:
        value: What YAML made of it, or the text of a command-line option.
        hint: The field's type hint.

    Returns:
        The value itself where its type fits; else the converted one: numbers written as text (`1e-5`), whole floats
        for an int field (`1e3`), one scalar for a list field, JSON for a dict field.

    Raises:
        ValueError: If no alternative of the hint can hold the value. The message names value and type.
    """
    members = _members(hint)
    if isinstance(value, dict) and any((get_origin(member) or member) is dict for member in members):
        _refuse_ambiguous(value)
    value = _without_marks(value)
    looks_like_json = isinstance(value, str) and value.lstrip().startswith("{")
    if looks_like_json and any((get_origin(member) or member) is dict for member in members):
        try:
            return _to_dict(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"{value!r} is not valid JSON: {error}.") from error
    if value == "None" and type(None) in members:
        return None
    if any(_matches(value, member) for member in members):
        return value
    if isinstance(value, str) and value.lower() in ("none", "null") and type(None) in members and str not in members:
        return None
    if not isinstance(value, str) and len([m for m in members if m is not type(None)]) > 1:
        members = tuple(member for member in members if member is not str)  # a number is no file name
    for member in members:
        try:
            return _convert(value, member)
        except _ExplainedError:
            raise
        except (ValueError, TypeError, AttributeError, OverflowError, StopIteration, argparse.ArgumentTypeError):
            continue
    fix = "; put it in quotes to keep it as text" if str in _members(hint) and isinstance(value, (bool, float)) else ""
    example = next((text for kind, text in _EXAMPLES.items() if kind in _members(hint)), "")
    raise ValueError(f"{value!r} is not a valid value: expected {_describe(hint)}{fix}.{example}")


class DROParser(TrlParser):
    """`TrlParser` that refuses what it does not understand.

    The command line overrides the file given by `--config`, which overrides the defaults. Differences to TrlParser:
    unknown keys are always errors, options cannot be abbreviated, `--config=X` works, a key given twice in the file is
    an error, values are coerced to the type of their field (from the file and from the command line alike), and dict
    fields take JSON on the command line.

    Args:
        dataclass_types: Dataclasses whose fields are the options.
        **kwargs: Passed to [`trl.TrlParser`].
    """

    def __init__(self, dataclass_types: Iterable[type], **kwargs: Any) -> None:
        dataclass_types = list(dataclass_types)
        super().__init__(cast(Any, dataclass_types), **{"allow_abbrev": False, **kwargs})
        # From the annotations: HfArgumentParser overwrites `Field.type` while it builds the options.
        self._hints = {name: hint for cls in dataclass_types for name, hint in _field_hints(cls).items()}
        for action in self._actions:
            if action.help and not _expands(action.help, {**vars(action), "prog": self.prog}):
                action.help = action.help.replace("%", "%%")
            if action.type is not None and action.dest in self._hints:
                action.type = _option_type(self._hints[action.dest], action.nargs == "+") or action.type

    def error(self, message: str) -> NoReturn:
        """Exit with code 2 and the message alone: the usage text of some 300 options would bury it."""
        self.exit(2, f"{self.prog}: error: {message}\n")

    def parse_args_and_config(
        self,
        args: Iterable[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
        separate_remaining_strings: bool = False,
    ) -> tuple[Any, ...]:
        """Parse the command line and the file that it names.

        Args:
            args: The command line, `sys.argv[1:]` if left out.
            return_remaining_strings, fail_with_unknown_args, separate_remaining_strings: As in TrlParser, but unknown
                options and keys are errors whatever is asked for, so nothing ever remains.

        Returns:
            One instance of each dataclass.

        Raises:
            ValueError: If the file or one of its values is bad, or a dataclass refuses its values.
            SystemExit: With code 2 and a message on stderr, if the command line is bad.
        """
        path, args = self._split_config(list(sys.argv[1:] if args is None else args))
        if path is not None:
            config = load_yaml(path)
            env = config.pop("env", None) or {}
            if not isinstance(env, dict):
                raise ValueError(f"--config {path}: `env` must be a mapping of environment variables, not {env!r}.")
            os.environ.update({str(name): _env_text(value) for name, value in env.items()})
            try:
                self.set_defaults_with_config(**config)
            except ValueError as error:
                raise ValueError(f"--config {path}: {error}") from error
        return super().parse_args_and_config(
            args, return_remaining_strings, fail_with_unknown_args, separate_remaining_strings
        )

    def set_defaults_with_config(self, **kwargs: Any) -> list[str]:
        """Make these values the defaults, coerced to the types of their fields.

        Raises:
            ValueError: For an unknown key (with the nearest known one) and for a value that does not fit.
        """
        defaults = {}
        actions = {action.dest: action for action in self._actions}
        for key, value in kwargs.items():
            if key not in self._hints:
                raise ValueError(f"unknown key `{key}`.{suggest(key, self._hints)}")
            optional = value is None and actions[key].default is None
            try:
                defaults[key] = None if optional else coerce(value, self._hints[key])
            except ValueError as error:
                raise ValueError(f"`{key}`: {error}") from error
            choices = actions[key].choices
            if choices is not None and defaults[key] is not None and defaults[key] not in choices:
                allowed = ", ".join(map(str, choices))
                raise ValueError(f"`{key}`: {defaults[key]!r} is not a valid value: expected one of {allowed}.")
        return super().set_defaults_with_config(**defaults)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:  # type: ignore[override]
        """Parse as argparse does, but exit with code 2 on anything unknown."""
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            token = next((token for token in unknown if token.startswith("-")), unknown[0])
            if not token.startswith("--"):
                self.error(f"unexpected argument {token!r}: options are written `--name value`.")
            name = token.partition("=")[0]
            near = suggest(name, ["--config", *self._option_string_actions])
            self.error(f"unknown option {name}.{near} `--help` lists all options.")
        return namespace, unknown

    def _split_config(self, args: list[str]) -> tuple[str | None, list[str]]:
        """Take `--config X` or `--config=X` out of the command line."""
        paths, rest = [], []
        tokens = iter(args)
        for token in tokens:
            if token == "--config":
                paths.append(next(tokens, ""))
            elif token.startswith("--config="):
                paths.append(token.removeprefix("--config="))
            else:
                rest.append(token)
        if len(paths) > 1:
            self.error(f"--config is given {len(paths)} times: give one file.")
        if paths and (not paths[0] or paths[0].startswith("--")):
            self.error("--config needs the path of a YAML file.")
        return (paths[0] if paths else None), rest


def _field_hints(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}


def _expands(text: str, params: dict[str, Any]) -> bool:
    """Whether argparse can %-format this help text."""
    try:
        text % params
    except (TypeError, ValueError, KeyError):
        return False
    return True


def _option_type(hint: Any, one_of_a_list: bool) -> Callable[[str], Any] | None:
    """The `type=` of an option; None where the upstream one must stay (a dataclass built from one string)."""
    if one_of_a_list:
        hint = next((arg for member in _members(hint) for arg in get_args(member)), Any)
    if any(dataclasses.is_dataclass(member) for member in _members(hint)):
        return None

    def convert(text: str) -> Any:
        try:
            return coerce(text, hint)
        except ValueError as error:  # argparse would replace the message of a ValueError
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def _env_text(value: Any) -> str:
    return "" if value is None else str(value)
