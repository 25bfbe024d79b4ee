"""The strict parser: values get the type of their field, and what is not understood is refused."""

import os
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

import pytest
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments

from trl_dro import DROConfig
from trl_dro.parsing import DROParser, coerce, load_yaml


@dataclass
class Part:
    path: str
    share: float | None = None


@dataclass
class Args:
    rate: float = field(default=0.1, metadata={"help": "Falls by 50% in the end."})
    steps: int = 10
    name: str | None = None
    fast: bool = False
    careful: bool = True
    weights: list[float] | None = None
    names: list[str] = field(default_factory=list)
    settings: dict[str, Any] | str | None = None
    flags: dict[str, bool] | None = None
    limit: int | None = 3
    size: int | str | None = "auto"
    mode: Literal["slow", "quick"] = "slow"
    dtype: str | None = field(default=None, metadata={"choices": ["float32", "bfloat16"]})
    parts: list[Part] = field(default_factory=list)


@pytest.fixture
def parse(tmp_path):
    """Parses a command line, with an optional configuration file."""

    def run(*args: str, yaml: str | None = None) -> Args:
        config = []
        if yaml is not None:
            path = tmp_path / "config.yaml"
            path.write_text(yaml)
            config = ["--config", str(path)]
        (result,) = DROParser([Args], prog="demo").parse_args_and_config([*config, *args])
        return result

    return run


@pytest.mark.parametrize(
    ("yaml", "name", "value"),
    [
        ("rate: 1e-5", "rate", 1e-5),
        ("rate: '1e-5'", "rate", 1e-5),
        ("rate: 1e3", "rate", 1000.0),
        ("rate: 2", "rate", 2.0),
        ("steps: 1e3", "steps", 1000),
        ("steps: 1_000", "steps", 1000),
        ("steps: 10.0", "steps", 10),
        ("name: no", "name", "no"),
        ("name: 12", "name", "12"),
        ("name: null", "name", None),
        ("name: None", "name", None),
        ("name:", "name", None),
        ("name: 2020-01-01", "name", "2020-01-01"),
        ("fast: yes", "fast", True),
        ("fast: 'true'", "fast", True),
        ("fast: 1", "fast", True),
        ("careful: false", "careful", False),
        ("weights: [1e-1, 2]", "weights", [0.1, 2.0]),
        ("weights: 1e-1", "weights", [0.1]),
        ("names: one", "names", ["one"]),
        ("names: [one, 2]", "names", ["one", "2"]),
        ("settings: {a: 1e-5, b: [1, 'no']}", "settings", {"a": 1e-5, "b": [1, "no"]}),
        ("names: [no, on]", "names", ["no", "on"]),
        ("settings: '{\"a\": 1}'", "settings", {"a": 1}),
        ("settings: file.json", "settings", "file.json"),
        ("flags: {a: true}", "flags", {"a": True}),
        ("limit: null", "limit", None),
        ("limit: none", "limit", None),
        ("size: 8", "size", 8),
        ("mode: quick", "mode", "quick"),
        ("dtype: bfloat16", "dtype", "bfloat16"),
        ("parts: [{path: a, share: 5e-1}, {path: b}]", "parts", [Part("a", 0.5), Part("b")]),
    ],
)
def test_a_value_in_the_file_gets_the_type_of_its_field(parse, yaml, name, value):
    got = getattr(parse(yaml=yaml), name)
    assert got == value
    assert type(got) is type(value)
    if isinstance(value, list):
        assert [type(item) for item in got] == [type(item) for item in value]


@pytest.mark.parametrize(("word", "meant"), [("no", "false"), ("Off", "false"), ("yes", "true"), ("ON", "true")])
def test_a_bare_word_that_other_tools_read_as_a_bool_is_refused_where_no_type_decides(parse, word, meant):
    for yaml in (f"settings: {{a: {word}}}", f"settings: {{a: {{b: [1, {word}]}}}}", f"settings: {{{word}: 1}}"):
        with pytest.raises(ValueError, match=f"`{word}` is ambiguous here. Write {meant}, or quote it: '{word}'"):
            parse(yaml=yaml)
    assert parse(yaml=f"settings: {{a: '{word}'}}").settings == {"a": word}


@pytest.mark.parametrize(
    ("args", "name", "value"),
    [
        (["--rate", "1e-5"], "rate", 1e-5),
        (["--rate=1e-5"], "rate", 1e-5),
        (["--steps", "1e3"], "steps", 1000),
        (["--fast"], "fast", True),
        (["--fast", "no"], "fast", False),
        (["--no_careful"], "careful", False),
        (["--weights", "1e-1", "2"], "weights", [0.1, 2.0]),
        (["--settings", '{"a": 1e-5}'], "settings", {"a": 1e-5}),
        (["--flags", '{"a": true}'], "flags", {"a": True}),
        (["--limit", "none"], "limit", None),
        (["--size", "auto"], "size", "auto"),
        (["--name", "None"], "name", None),
        (["--parts", "a"], "parts", [Part("a")]),
    ],
)
def test_a_value_on_the_command_line_gets_the_type_of_its_field(parse, args, name, value):
    got = getattr(parse(*args), name)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        (
            "rate: fast",
            r"`rate`: 'fast' is not a valid value: expected float\. Write a number, such as 0\.5 or 1e-5\.$",
        ),
        ("rate: true", r"`rate`: True is not a valid value: expected float"),
        ("rate: null", r"`rate`: None is not a valid value: expected float"),
        ("steps: 1.5", r"`steps`: 1.5 is not a valid value: expected int\. Write a whole number, such as 8\.$"),
        ("limit: x", r"`limit`: 'x' is not a valid value: expected int or None\. Write a whole number, such as 8\.$"),
        ("steps: true", r"`steps`: True"),
        ("steps: [1, 2]", r"`steps`: \[1, 2\]"),
        ("fast: 3", r"`fast`: 3 is not a valid value: expected bool\. Write true or false\.$"),
        ("fast: off", r"`fast`: 'off' is not a valid value: expected bool"),
        ("name: 1.10", r"`name`: 1.1 .* put it in quotes"),
        ("weights: [a]", r"`weights`: \['a'\] is not a valid value: expected list\[float\]"),
        ("settings: 5", r"`settings`: 5 is not a valid value"),
        ("settings: '{bad'", r"`settings`: '\{bad' is not valid JSON"),
        ("flags: [a]", r"`flags`: \['a'\]"),
        ("mode: turbo", r"`mode`: 'turbo' is not a valid value: expected"),
        ("dtype: int8", r"`dtype`: 'int8' is not a valid value: expected one of float32, bfloat16"),
        ("parts: [{pth: a}]", r"`parts`: unknown key `pth` of Part. Did you mean `path`\?"),
        ("parts: [{path: a, share: x}]", r"`parts`: .* is not a valid Part: 'x'"),
        ("parts: [{share: 1}]", r"`parts`: .* is not a valid Part"),
        ("ratee: 1", r"unknown key `ratee`. Did you mean `rate`\?"),
        ("zzzz: 1", r"unknown key `zzzz`\.$"),
        ("rate: 1\nsteps: 2\nrate: 3", r"`rate` is given twice \(second time in line 3\)"),
        ("settings: {a: 1, a: 2}", r"`a` is given twice"),
        ("- a", r"must hold a mapping"),
        ("", r"must hold a mapping"),
        ("rate: {a", r"not valid YAML"),
        ("rate: !!python/object:os.system {}", r"not valid YAML"),
        ("env: 3", r"`env` must be a mapping"),
    ],
)
def test_what_cannot_be_understood_in_the_file_is_refused(parse, yaml, message):
    with pytest.raises(ValueError, match=message):
        parse(yaml=yaml)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--ratee", "1"], "unknown option --ratee. Did you mean `--rate`?"),
        (["--rat", "1"], "unknown option --rat."),
        (["--conf", "x"], "unknown option --conf. Did you mean `--config`?"),
        (["stray"], "unexpected argument 'stray'"),
        (["--rate", "fast"], "'fast' is not a valid value: expected float. Write a number, such as 0.5 or 1e-5."),
        (["--steps", "1.5"], "'1.5' is not a valid value: expected int"),
        (["--settings", "{bad"], "is not valid JSON"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
        (["--config"], "--config needs the path of a YAML file"),
        (["--config", "--rate"], "--config needs the path of a YAML file"),
        (["--config", "a", "--config=b"], "--config is given 2 times"),
    ],
)
def test_a_bad_command_line_exits_with_code_2_and_one_line(parse, capsys, args, message):
    with pytest.raises(SystemExit) as exit_info:
        parse(*args)
    assert exit_info.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_unknown_keys_are_refused_even_when_a_caller_asks_to_keep_them(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("num_processes: 2")
    with pytest.raises(ValueError, match="unknown key `num_processes`"):
        DROParser([Args]).parse_args_and_config(["--config", str(path)], return_remaining_strings=True)
    with pytest.raises(SystemExit):
        DROParser([Args]).parse_args_and_config(["--num_processes", "2"], fail_with_unknown_args=False)


def test_the_command_line_wins_over_the_file_and_the_file_over_the_default(parse):
    args = parse("--steps", "7", yaml="steps: 5\nrate: 0.5")
    assert (args.steps, args.rate, args.limit) == (7, 0.5, 3)


def test_the_file_can_be_given_with_an_equals_sign(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("steps: 5")
    (args,) = DROParser([Args]).parse_args_and_config([f"--config={path}"])
    assert args.steps == 5


def test_a_missing_file_is_a_readable_error(tmp_path):
    with pytest.raises(ValueError, match=r"--config .*nothing.yaml: cannot read this file"):
        load_yaml(tmp_path / "nothing.yaml")


def test_a_merged_anchor_may_be_overridden(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("settings:\n  a: &base {x: 1, y: 2}\n  b: {<<: *base, y: 3}\n")
    assert load_yaml(path)["settings"]["b"] == {"x": 1, "y": 3}


def test_the_environment_of_the_file_is_set(parse, monkeypatch):
    monkeypatch.setenv("TRL_DRO_TEST", "before")
    parse(yaml="env: {TRL_DRO_TEST: no}\nsteps: 5")
    assert os.environ["TRL_DRO_TEST"] == "no"


def test_help_is_printed_even_if_a_text_holds_a_percent_sign(capsys):
    with pytest.raises(SystemExit) as exit_info:
        DROParser([Args]).parse_args_and_config(["--help"])
    assert exit_info.value.code == 0
    assert "Falls by 50% in the end." in capsys.readouterr().out


def test_a_parser_does_not_change_what_the_next_one_accepts(parse):
    for _ in range(2):
        assert parse(yaml="weights: 1\nsettings: {a: 1}") == Args(weights=[1.0], settings={"a": 1})


def test_every_default_of_trls_scripts_is_left_as_it_is():
    parser = DROParser([ScriptArguments, DROConfig, ModelConfig, DatasetMixtureConfig])
    parsed = parser.parse_args_and_config("--use_cpu true --bf16 false --dro_beta 0.5 --num_iterations 2".split())
    config = DROConfig(use_cpu=True, bf16=False, dro_beta=0.5, num_iterations=2)
    built = (ScriptArguments(), config, ModelConfig(), DatasetMixtureConfig())
    for ours, theirs in zip(parsed, built, strict=True):
        assert is_dataclass(ours)
        different = [f.name for f in fields(theirs) if f.init and getattr(ours, f.name) != getattr(theirs, f.name)]
        assert different == []


def test_a_list_for_a_field_of_several_types_is_kept():
    assert coerce(["a"], None | str | list[str]) == ["a"]
    assert coerce("none", None | str | list[str]) == "none"
