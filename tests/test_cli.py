"""The `trl-dro` command: exit codes, messages, the plan, and how a launch is put together."""

import argparse
import os
import re
import shlex
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml

from trl_dro import DROTrainer, __version__, checkpoints, cli, list_policy_losses
from trl_dro import train as train_script
from trl_dro.tasks import build_task, build_tiny_model


ROOT = Path(__file__).parent.parent
RECIPES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "recipes").rglob("*.yaml"))
QUICKSTART = str(ROOT / "recipes" / "quickstart" / "dro" / "config.yaml")
TRAIN = DROTrainer.train
SMALL = {
    "model_name_or_path": "tiny-qwen3",
    "tiny_warmup_steps": 2,
    "task": "spell_backward",
    "task_kwargs": {"max_word_len": 4},
    "tiny_prompt_template": "{metadata[word]}=",
    "task_train_size": 16,
    "task_eval_size": 4,
    "show_completions": 2,
    "dro_beta": 0.5,
    "num_iterations": 4,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "num_generations": 4,
    "per_device_eval_batch_size": 4,
    "max_completion_length": 4,
    "max_steps": 2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
}


NO_TASK = {"task": None, "task_kwargs": None, "task_train_size": 2000, "task_eval_size": 0}
OF_HUB = {"dataset_name": "mine", "model_name_or_path": "mine", "reward_funcs": ["tests.tiny.length_reward"]}


@pytest.fixture
def config(tmp_path):
    """Writes a small configuration, with changes, and returns its path."""

    def write(**changes) -> str:
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump({"output_dir": str(tmp_path / "run"), **SMALL, **changes}))
        return str(path)

    return write


def exit_code(*argv: str) -> int:
    try:
        return cli.main(list(argv))
    except SystemExit as error:
        return error.code


def test_version_and_losses_do_not_load_trl():
    code = """if True:
        import sys
        from trl_dro.cli import main
        try:
            main(sys.argv[1:])
        except SystemExit:
            pass
        print("trl" in sys.modules, "torch" in sys.modules)
    """
    loaded = {
        name: subprocess.run([sys.executable, "-c", code, name], capture_output=True, text=True, check=True).stdout
        for name in ("--version", "losses")
    }
    assert loaded["--version"].splitlines() == [f"trl-dro {__version__}", "False False"]
    assert loaded["losses"].splitlines()[-1] == "False True"


def test_losses_lists_every_objective_with_aliases_parameters_and_summary(capsys):
    assert exit_code("losses") == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line for line in out.splitlines() if line[:1].strip()}
    assert set(list_policy_losses()) <= set(rows)
    assert "vanilla" in rows["ppo_clip"]
    assert "epsilon_low=0.2" in rows["ppo_clip"]
    assert "beta (required)" in rows["dro"]
    assert "quadratic" in rows["dro"]


def test_env_names_our_version_and_trls(capsys):
    assert exit_code("env") == 0
    out = capsys.readouterr().out
    assert f"trl-dro version: {__version__}" in out
    assert "TRL version:" in out


def test_check_prints_the_plan(config, capsys):
    assert exit_code("check", "--config", config()) == 0
    out = capsys.readouterr().out
    for line in (
        "model             tiny-qwen3 (not loaded)",
        "optimizer step    8 rows = 1 process x 4 per device x 2 accumulation steps",
        "generation batch  8 rows = 2 prompts x 4 completions (2 micro-steps, used 4x)",
        "updates           4 optimizer steps on each generation batch",
        "staleness         at most 3 optimizer steps since the policy that sampled",
        "penalty           alive",
        "  0.5    1         2.718",
        "  2      4         54.6",
        "The configuration is valid.",
    ):
        assert line in out
    assert "DRO(beta=0.5, level='token', huber_delta=None)" in out
    assert "warning" not in out


def test_check_shows_what_is_corrected_compared_and_adapted(config, capsys):
    settings = {
        "use_vllm": True,
        "rollout_correction_preset": "decoupled_geo_rs_seq_tis",
        "advantage_baseline": "soft",
        "dro_target_kl": 0.01,
        "dro_huber_delta": 2.0,
        "max_completion_length": 50,
    }
    options = ["--rollout_is_batch_normalize", "false", "--max_completion_length", "50"]
    assert exit_code("check", "--config", config(**settings), *options) == 0
    out = capsys.readouterr().out
    for line in (
        "correction        sequence weights, cut to 2; rejects seq_mean_k1 outside engine / trainer ratios "
        "[0.999, 1.001]",
        "baseline          soft, temperature dro_beta / mean completion length",
        "  2      inf       without bound",
        "about the same at dro_level='sequence': dro_beta = 0.5 / length, 0.01 for completions of 50 tokens",
        "dro_beta is adapted from there to a mean l^2 / 2 of 0.01",
    ):
        assert line in out


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--rollout_is", "token"], "token weights, cut to 2"),
        (
            ["--rollout_is", "token", "--rollout_is_threshold_lower", "0.5", "--rollout_is_batch_normalize"],
            "token weights, zero outside [0.5, 2], normalised",
        ),
        (
            ["--rollout_rs", "token_k1", "seq_mean_k3", "--rollout_rs_threshold", "2", "1e-2"],
            "rejects token_k1 outside engine / trainer ratios [0.5, 2]; rejects seq_mean_k3 above 0.01",
        ),
        (
            ["--rollout_rs", "token_k1,seq_max_k2", "--rollout_rs_threshold", "2", "3"],
            "rejects token_k1 outside engine / trainer ratios [0.5, 2]; rejects seq_max_k2 above 3",
        ),
    ],
    ids=" ".join,
)
def test_corrections_can_be_written_on_the_command_line(options, line, config, capsys):
    lower = ["--rollout_rs_threshold_lower", "0.5"] if "--rollout_rs" in options else []
    assert exit_code("check", "--config", config(), "--use_vllm", "true", *options, *lower) == 0
    assert f"correction        {line}\n" in capsys.readouterr().out


def test_check_shows_a_dead_penalty_and_the_warning_about_it(config, capsys):
    assert exit_code("check", "--config", config(), "--num_iterations", "1") == 0
    out = capsys.readouterr().out
    assert "updates           1 optimizer step on each generation batch" in out
    assert "staleness         at most 0 optimizer steps" in out
    assert "penalty           dead" in out
    assert "warning: DRO's penalty does nothing here" in out


def test_check_of_another_objective_has_no_resting_points(config, capsys):
    assert exit_code("check", "--config", config(dro_beta=None, policy_loss="ppo_clip")) == 0
    out = capsys.readouterr().out
    assert "PPOClip(" in out
    assert "l*" not in out


def test_check_knows_that_a_launch_has_several_processes(config, capsys):
    # With one process these 2 rows could not hold a group of 4 completions.
    options = [
        "--per_device_train_batch_size",
        "2",
        "--gradient_accumulation_steps",
        "1",
        "--per_device_eval_batch_size",
        "2",
    ]
    assert exit_code("check", "--config", config(), *options) == 1
    assert "num_generations=4 is refused" in capsys.readouterr().err
    for launch in (["--num_processes", "2"], ["--accelerate_config", "cpu_ddp"]):
        assert exit_code("check", "--config", config(), *options, *launch) == 0
        assert "4 rows = 2 processes x 2 per device" in capsys.readouterr().out
    assert "WORLD_SIZE" not in os.environ


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_shipped_recipe_is_valid(recipe, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert exit_code("check", "--config", recipe) == 0
    assert "penalty           alive" in capsys.readouterr().out


def test_the_quickstart_takes_a_hub_model_in_one_line(capsys):
    assert exit_code("check", "--config", QUICKSTART, "--model_name_or_path", "Qwen/Qwen3-0.6B") == 0
    assert "Qwen/Qwen3-0.6B (not loaded)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        ([], 2, "required: COMMAND"),
        (["trian"], 2, "invalid choice: 'trian'"),
        (["losses", "dro"], 2, "unrecognized arguments: dro"),
        (["check", "--config", QUICKSTART, "stray"], 2, "unexpected argument 'stray'"),
        (["check", "--learning_rat", "1"], 2, "Did you mean `--learning_rate`?"),
        (["check", "--num_processe", "2"], 2, "Did you mean `--num_processes`?"),
        (["check", "--config", QUICKSTART, "--num_processes", "2", "stray"], 2, "unexpected argument 'stray'"),
        (["check", "--config", QUICKSTART, "--num_processes", "two"], 2, "invalid int value: 'two'"),
        (["check", "--config", "nothing.yaml"], 1, "cannot read this file"),
        (["check", "--config", QUICKSTART, "--dro_beta", "-1"], 1, "dro_beta=-1.0 is refused"),
        (["check", "--config", QUICKSTART, "--task", "spell_back"], 1, "Nearest: spell_backward"),
        (["check", "--config", QUICKSTART, "--reward_funcs", "reasoning_gym"], 1, "Known: reasoning_gym_"),
        (
            ["check", "--config", QUICKSTART, "--num_generations_eval", "8", "--per_device_eval_batch_size", "12"],
            1,
            "=12",
        ),
        (["check", "--config", QUICKSTART, "--anchor_policy", "sampling"], 1, "use_vllm=True"),
        (
            ["check", "--config", QUICKSTART, "--use_peft", "true", "--beta", "0.1", "--sync_ref_model", "true"],
            1,
            "sync_ref_model=False",
        ),
        (["train", "--config", QUICKSTART, "--accelerate_config", "tpu"], 1, "one of the names cpu_ddp, "),
        (["train", "--config", QUICKSTART, "--num_processes", "2", "--dro_beta", "0"], 1, "dro_beta=0.0 is refused"),
    ],
)
def test_errors_are_one_message_and_an_exit_code(argv, code, message, capsys, monkeypatch):
    monkeypatch.setattr(cli, "_launch", lambda arguments: pytest.fail("launched a bad configuration"))
    assert exit_code(*argv) == code
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize("command", ["train", "check"])
def test_help_explains_the_command(command, capsys):
    assert exit_code(command, "--help") == 0
    said = capsys.readouterr().out
    assert f"usage: trl-dro {command} --config X.yaml" in said
    assert command == "check" or "`auto` for it if there is one" in " ".join(said.split())


def test_a_reader_that_leaves_early_gets_no_traceback(config):
    """`trl-dro check --config X.yaml | head -1`"""
    command = [sys.executable, "-m", "trl_dro.cli", "check", "--config", config()]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 141
    assert "BrokenPipeError" not in err


@pytest.mark.parametrize("command", ["check", "train"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"task_train_size": 1},
            "task_train_size=1 is refused: train_dataset has 1 rows, one generation batch takes 2",
        ),
        ({"task_eval_size": 0, "eval_strategy": "steps", "eval_steps": 1}, "Write `task_eval_size=64` instead"),
        (
            {
                **NO_TASK,
                "datasets": [{"path": "json"}],
                "model_name_or_path": "mine",
                "reward_funcs": ["tests.tiny.length_reward"],
                "eval_strategy": "epoch",
            },
            "eval_strategy='epoch' is refused: `datasets` are mixed into one training split, nothing is held out. "
            "Write `test_split_size=0.1` instead.",
        ),
        (
            {**NO_TASK, **OF_HUB, "task_seed": 1},
            "task_seed=1 is refused: without task nothing reads it. Write `task='spell_backward'` instead.",
        ),
        ({"lora_r": 8}, "lora_r=8 is refused: without use_peft nothing reads it. Write `use_peft=True` instead."),
        (
            {**NO_TASK, **OF_HUB, "dataset_name": None, "datasets": [{"path": "json"}], "do_eval": True},
            "do_eval=True is refused: `datasets` are mixed into one training split",
        ),
        ({"task_eval_size": 0, "eval_on_start": True}, "eval_on_start=True is refused: there are no held-out rows"),
        ({**NO_TASK, **OF_HUB, "dataset_streaming": True, "max_steps": -1}, "max_steps=-1 is refused: of a stream"),
        ({"do_predict": True}, "do_predict=True is refused: this command trains and evaluates only"),
    ],
)
def test_rows_that_cannot_suffice_are_refused_before_anything_is_built(
    command, changes, message, config, tmp_path, capsys
):
    assert exit_code(command, "--config", config(**changes)) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"trl-dro {command}: error: ")
    assert message in err
    assert "Traceback" not in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("argv", [["check"], ["train"], ["train", "--num_processes", "1"]], ids=" ".join)
def test_an_output_dir_with_a_file_in_its_way_is_refused(argv, config, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cli, "_launch", lambda arguments: pytest.fail("launched"))
    (tmp_path / "file").write_text("")
    assert exit_code(*argv, "--config", config(output_dir=str(tmp_path / "file" / "run"))) == 1
    out, err = capsys.readouterr()
    assert err.startswith(f"trl-dro {argv[0]}: error: output_dir=")
    assert "it cannot be written" in err
    assert "Traceback" not in err
    assert "Building" not in out


def test_check_leaves_no_directory_behind_and_touches_none(config, tmp_path):
    (tmp_path / "there").mkdir()
    for folder in ("new/run", "there"):
        assert exit_code("check", "--config", config(output_dir=str(tmp_path / folder))) == 0
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "there").is_dir()


def test_train_without_launcher_options_runs_in_this_process(config, tmp_path, capsys):
    assert exit_code("train", "--config", config()) == 0
    out = capsys.readouterr().out
    assert "step 2/2 |" in out
    assert "held-out reward:" in out
    assert (tmp_path / "run" / "model.safetensors").is_file()
    assert (tmp_path / "run" / "tokenizer.json").is_file()


def test_a_tiny_model_trains_without_held_out_rows(config, capsys):
    assert exit_code("train", "--config", config(task_eval_size=0)) == 0
    out = capsys.readouterr().out
    assert "step 2/2 |" in out
    assert "held-out" not in out


def test_a_run_whose_rewards_are_all_none_is_reported(config, tmp_path, monkeypatch, capsys):
    (tmp_path / "silent_reward.py").write_text(
        "def silent(completions, **kwargs):\n    return [None] * len(completions)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert exit_code("train", "--config", config(), "--reward_funcs", "silent_reward.silent") == 0
    out = capsys.readouterr().out
    assert "eval at step 0 | reward none" in out
    assert "held-out reward: none before, none after" in out


def launched(monkeypatch, *argv: str) -> argparse.Namespace:
    """The arguments that `accelerate launch` would get."""
    seen: list[argparse.Namespace] = []
    monkeypatch.setattr(cli, "_launch", lambda arguments: seen.append(arguments) or 0)
    monkeypatch.setattr(train_script, "run", lambda *arguments: pytest.fail("trained in this process"))
    assert exit_code("train", *argv) == 0
    return seen[0]


def test_the_quickstart_trains_a_chat_model_from_a_path_on_the_full_question(tmp_path, monkeypatch):
    """What the hint after the quickstart says, with a tiny model of Qwen3's architecture in place of the Hub's."""
    train_rows, _ = build_task("spell_backward", train_size=50, task_kwargs={"min_word_len": 3, "max_word_len": 3})
    characters = "".join(map(chr, range(32, 127))) + "\n"
    model, tokenizer = build_tiny_model("tiny-qwen3", [characters, *train_rows["prompt"]])
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    model.save_pretrained(tmp_path / "chat")
    tokenizer.save_pretrained(tmp_path / "chat")
    seen = []
    monkeypatch.setattr(
        DROTrainer, "train", lambda self, **_: seen.append(self.train_dataset[0]["prompt"]) or TRAIN(self)
    )
    options = shlex.split(train_script.HUB_MODEL)
    options[options.index("--model_name_or_path") + 1] = str(tmp_path / "chat")
    options[options.index("--output_dir") + 1] = str(tmp_path / "run")
    for name, value in (("--use_cpu", "true"), ("--bf16", "false"), ("--gradient_accumulation_steps", "2")):
        options[options.index(name) + 1] = value
    small = ["--max_steps", "2", "--task_eval_size", "8", "--logging_steps", "1"]
    assert exit_code("train", "--config", QUICKSTART, *options, *small) == 0
    assert seen[0][0]["role"] == "user"
    assert "backward" in seen[0][0]["content"]
    assert (tmp_path / "run" / "model.safetensors").is_file()


def test_a_launch_that_came_up_smaller_than_asked_for_is_refused(config, monkeypatch, capsys):
    """Without a GPU, `accelerate launch --num_processes 2` starts one process and says nothing."""
    monkeypatch.setenv(train_script.EXPECTED_PROCESSES, "2")
    assert exit_code("train", "--config", config()) == 1
    assert "num_processes=2 were asked for, 1 came up" in capsys.readouterr().err


def test_an_engine_that_is_not_installed_is_refused_before_anything_is_loaded(config, capsys):
    assert exit_code("train", "--config", config(), "--use_vllm", "true") == 1
    err = capsys.readouterr().err
    assert "vllm is not installed here" in err


@pytest.fixture
def dataset_config(config, tmp_path):
    """Writes a configuration of a model on disk and a dataset of 8 rows, with changes, and returns its path."""
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").write_text('{"prompt": "ab="}\n' * 8)
    model, tokenizer = build_tiny_model("tiny-qwen3", ["ab="])
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    own = {
        **NO_TASK,
        "dataset_name": str(tmp_path / "rows"),
        "model_name_or_path": str(tmp_path / "model"),
        "reward_funcs": ["tests.tiny.length_reward"],
    }
    return lambda **changes: config(**{**own, **changes})


def refused_by_train(capsys, *argv: str) -> str:
    """The line that `trl-dro train` ends with; `datasets` may have drawn progress bars before it."""
    assert exit_code("train", *argv) == 1
    err = capsys.readouterr().err
    assert "Traceback" not in err
    prefix, line = err.splitlines()[-1].split("error: ", 1)
    assert prefix == "trl-dro train: "
    return line


def test_a_split_that_is_not_there_is_refused_with_those_that_are(dataset_config, monkeypatch, capsys):
    monkeypatch.setattr(DROTrainer, "__init__", lambda *_, **__: pytest.fail("built a trainer"))
    line = refused_by_train(capsys, "--config", dataset_config(dataset_train_split="training"))
    assert line == (
        "dataset_train_split='training' is refused: the dataset has the splits train. Write "
        "`dataset_train_split='train'` instead."
    )
    line = refused_by_train(capsys, "--config", dataset_config(eval_strategy="epoch"))
    assert line == (
        "dataset_test_split='test' is refused: the dataset has the splits train. Write `eval_strategy='no'` instead."
    )


def test_what_the_trainer_refuses_is_one_line(dataset_config, capsys):
    line = refused_by_train(capsys, "--config", dataset_config(gradient_accumulation_steps=16))
    assert line.startswith("train_dataset has 8 rows, one generation batch takes 16 prompts")
    assert line.endswith("or give more rows.")


def test_what_a_library_refuses_is_one_line_that_names_the_place(dataset_config, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    line = refused_by_train(capsys, "--config", dataset_config(model_name_or_path=str(tmp_path / "empty")))
    assert str(tmp_path / "empty") in line
    assert re.search(r"\(\w+Error in .*transformers.*\.py, line \d+\)$", line)


def test_a_checkpoint_that_is_not_there_is_refused_before_anything_is_built(config, tmp_path, capsys):
    for asked, message in (
        ("true", "there is no whole checkpoint in output_dir="),
        ("mine", "there is no such directory"),
    ):
        line = refused_by_train(capsys, "--config", config(), "--resume_from_checkpoint", asked)
        assert line.startswith(f"resume_from_checkpoint='{asked}' is refused: {message}")
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize("where", ["command line", "file"])
def test_a_run_resumes_from_its_newest_checkpoint_when_told_true(where, config, capsys):
    path = config(save_strategy="steps", save_steps=2, max_steps=4)
    assert exit_code("train", "--config", path, "--max_steps", "2") == 0
    capsys.readouterr()
    if where == "file":
        resume = ["--config", config(save_strategy="steps", save_steps=2, max_steps=4, resume_from_checkpoint=True)]
    else:
        resume = ["--config", path, "--resume_from_checkpoint", "true"]
    assert exit_code("train", *resume) == 0
    out = capsys.readouterr().out
    assert f"Resuming from {Path(path).parent / 'run' / 'checkpoint-2'}." in out
    assert "Building tiny-qwen3" not in out
    assert "step 4/4" in out
    assert "step 2/4" not in out


def test_a_checkpoint_of_another_setup_is_refused_in_one_line(config, capsys):
    path = config(save_strategy="steps", save_steps=2)
    assert exit_code("train", "--config", path) == 0
    capsys.readouterr()
    other = ["--max_steps", "4", "--resume_from_checkpoint", "auto", "--dro_level", "sequence"]
    line = refused_by_train(capsys, "--config", path, *other)
    assert re.search(r"checkpoint-2' is refused: policy_loss.*'token'.* and is .*'sequence'", line)


def test_a_run_told_not_to_resume_is_scored_before_training_too(config, capsys):
    assert exit_code("train", "--config", config(), "--resume_from_checkpoint", "false") == 0
    assert "eval at step 0" in capsys.readouterr().out
    assert exit_code("train", "--config", config(resume_from_checkpoint=False)) == 0
    assert "eval at step 0" in capsys.readouterr().out


def test_doubts_about_a_configuration_are_plain_lines(config, monkeypatch, capsys):
    monkeypatch.setattr(train_script, "run", lambda *arguments: 0)
    assert exit_code("train", "--config", config(), "--num_iterations", "1") == 0
    err = capsys.readouterr().err
    assert err.startswith("warning: DRO's penalty does nothing here")
    assert ".py" not in err


def test_an_interrupted_run_ends_without_a_traceback(config, monkeypatch, capsys):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(train_script, "run", interrupted)
    assert exit_code("train", "--config", config()) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_an_error_in_training_shows_where_it_came_from(config, tmp_path, monkeypatch, capsys):
    (tmp_path / "broken_reward.py").write_text(
        "def broken(completions, **kwargs):\n    raise ValueError('no such answer')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert exit_code("train", "--config", config(), "--reward_funcs", "broken_reward.broken") == 1
    err = capsys.readouterr().err
    assert "in broken" in err
    assert "no such answer" in err


@pytest.fixture
def dying_run(config, tmp_path, monkeypatch, capsys):
    """Trains until the reward function raises this error at a step, and returns exit code and stderr."""
    (tmp_path / "dying_reward.py").write_text(
        "import os\n\n"
        "def dies(completions, trainer_state, **kwargs):\n"
        "    if trainer_state.global_step >= int(os.environ['DIES_AT']):\n"
        "        raise {'KeyboardInterrupt': KeyboardInterrupt, 'ValueError': ValueError}[os.environ['DIES_OF']]\n"
        "    return [float(len(completion)) for completion in completions]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    def train(error: str = "ValueError", step: int = 2, **changes) -> tuple[int, str]:
        monkeypatch.setenv("DIES_AT", str(step))
        monkeypatch.setenv("DIES_OF", error)
        settings = {"reward_funcs": ["dying_reward.dies"], "num_iterations": 1, "max_steps": 8, "task_eval_size": 0}
        code = exit_code("train", "--config", config(**{**settings, **changes}))
        return code, capsys.readouterr().err

    return train


def test_a_run_that_dies_says_that_nothing_was_saved(dying_run, tmp_path):
    code, err = dying_run()
    assert code == 1
    assert "in dies" in err  # the traceback
    assert err.endswith("2 optimizer steps had been trained. Nothing was saved: save_strategy is no.\n")
    assert not (tmp_path / "run" / "model.safetensors").exists()
    _, err = dying_run(save_strategy="steps", save_steps=3)
    assert err.endswith("Nothing was saved: save_strategy is steps with save_steps=3.\n")
    _, err = dying_run(step=0)
    assert "had been trained" not in err


def test_a_run_that_dies_names_its_own_newest_checkpoint(dying_run, tmp_path):
    earlier = tmp_path / "run" / "checkpoint-100"
    earlier.mkdir(parents=True)
    saving = {"save_strategy": "steps", "save_steps": 1}
    _, err = dying_run(**saving)
    assert err.endswith(f"The newest checkpoint on disk is {tmp_path / 'run' / 'checkpoint-2'}.\n")
    earlier.rmdir()
    _, err = dying_run(resume_from_checkpoint="true", save_strategy="no", step=3)
    assert err.endswith(
        f"3 optimizer steps had been trained. The newest checkpoint on disk is {tmp_path / 'run' / 'checkpoint-2'}.\n"
    )


def test_an_interrupted_run_says_what_was_saved(dying_run):
    code, err = dying_run("KeyboardInterrupt")
    assert code == 130
    assert err.endswith("\nInterrupted. 2 optimizer steps had been trained. Nothing was saved: save_strategy is no.\n")
    assert "Traceback" not in err


def test_launcher_options_go_to_accelerate_and_the_others_to_the_script(config, monkeypatch):
    path = config()
    arguments = launched(
        monkeypatch, "--num_processes", "2", "--config", path, "--mixed_precision=no", "--max_steps", "2"
    )
    assert arguments.num_processes == 2
    assert arguments.mixed_precision == "no"
    assert arguments.module is True
    assert arguments.training_script == "trl_dro.train"
    assert arguments.training_script_args == ["--config", path, "--max_steps", "2"]


def test_an_accelerate_config_is_found_by_name_and_by_path(config, monkeypatch, tmp_path):
    path = config()
    shipped = launched(monkeypatch, "--config", path, "--accelerate_config", "cpu_ddp").config_file
    assert Path(shipped) == ROOT / "accelerate_configs" / "cpu_ddp.yaml"
    own = tmp_path / "mine.yaml"
    own.write_text(Path(shipped).read_text())
    assert launched(monkeypatch, "--config", path, f"--accelerate_config={own}").config_file == str(own)


def test_validating_before_a_launch_leaves_the_environment_alone(config, monkeypatch):
    before = dict(os.environ)
    launched(monkeypatch, "--config", config(env={"TRL_DRO_TEST": "1"}), "--num_processes", "2")
    assert dict(os.environ) == before


def test_launchers_of_several_machines_do_not_remove_the_directory_that_all_of_them_use(config, monkeypatch, tmp_path):
    launched(monkeypatch, "--config", config(), "--num_processes", "2")
    assert (tmp_path / "run").is_dir()


def test_a_failed_launch_is_exit_code_1_without_a_traceback(config, monkeypatch, capsys):
    def fail(arguments):
        raise subprocess.CalledProcessError(1, "python")

    monkeypatch.setattr("accelerate.commands.launch.launch_command", fail)
    assert exit_code("train", "--config", config(), "--num_processes", "1") == 1
    assert "a training process failed" in capsys.readouterr().err


RANK_REWARD = """
import torch.distributed as dist

def leave_a_trace(completions, **kwargs):
    open(f"rank{dist.get_rank()}of{dist.get_world_size()}", "w").close()
    return [float(len(completion)) for completion in completions]
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [
        [sys.executable, "-m", "trl_dro.cli", "train", "--accelerate_config", "cpu_ddp"],
        [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "cpu_ddp.yaml", "-m", "trl_dro.train"],
    ],
    ids=["trl-dro", "accelerate"],
)
def test_two_processes_train_together_and_print_once(launcher, config, tmp_path):
    (tmp_path / "rank_reward.py").write_text(RANK_REWARD)
    (tmp_path / "cpu_ddp.yaml").write_text((ROOT / "accelerate_configs" / "cpu_ddp.yaml").read_text())
    path = config(reward_funcs=["rank_reward.leave_a_trace"])
    done = subprocess.run(
        [*launcher, "--config", path],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(trace.name for trace in tmp_path.glob("rank*of*")) == ["rank0of2", "rank1of2"]
    for line in ("step 2/2 |", "held-out reward:", "Saved in"):
        assert done.stdout.count(line) == 1
    assert (tmp_path / "run" / "model.safetensors").is_file()


def test_processes_whose_launcher_is_killed_save_and_end(config, tmp_path):
    """They would go on otherwise, and write to the same place as the run that is resumed."""
    path = config(save_strategy="steps", save_steps=1, save_total_limit=2, max_steps=100_000)
    with open(tmp_path / "said", "w") as said:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "trl_dro.cli", "train", "--accelerate_config", "cpu_ddp", "--config", path],
            stdout=said,
            stderr=said,
            env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
    workers: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + 200
        while checkpoints.newest_complete(tmp_path / "run")[0] is None and time.monotonic() < deadline:
            time.sleep(0.2)
        workers = psutil.Process(launcher.pid).children(recursive=True)
        assert len(workers) >= 2
        launcher.kill()
        launcher.wait()
        _, alive = psutil.wait_procs(workers, timeout=60)
        assert alive == []
    finally:
        for process in (launcher, *workers):
            with suppress(psutil.NoSuchProcess):
                process.kill()
    newest, torn = checkpoints.newest_complete(tmp_path / "run")
    assert torn == {}
    assert f"Stopped by the end of its launcher after {newest.rpartition('-')[2]} " in (tmp_path / "said").read_text()


LAUNCHED = """
import os, signal, subprocess, sys
import accelerate.commands.launch
from trl_dro import cli

def launch_command(args):
    code = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); "
    code += "print(1, flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    process.stdout.readline()
    os.kill(os.getpid(), signal.SIGTERM)  # what a scheduler sends to the launcher
    if process.wait() != 0:
        raise subprocess.CalledProcessError(process.returncode, "child")

accelerate.commands.launch.launch_command = launch_command
before = signal.getsignal(signal.SIGTERM)
code = cli._launch(None)
assert signal.getsignal(signal.SIGTERM) is before
sys.exit(code)
"""


def test_the_launcher_of_one_process_passes_sigterm_on_and_its_code_back():
    done = subprocess.run([sys.executable, "-c", LAUNCHED], check=False, timeout=60, cwd=ROOT)
    assert done.returncode == 143
