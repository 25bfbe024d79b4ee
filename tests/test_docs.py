"""README and docs say only what is so: links lead somewhere, code runs, tables are complete."""

import contextlib
import re
from pathlib import Path

import datasets
import pytest
import yaml
from datasets import Dataset

from trl_dro import DROConfig, DROTrainer, get_policy_loss, list_policy_losses
from trl_dro.advantages import BASELINES
from trl_dro.off_policy_rules import CORRECTION_FIELDS
from trl_dro.parsing import DROParser
from trl_dro.policy_loss import policy_loss_aliases, policy_loss_parameters, resolve_policy_loss
from trl_dro.rollout_correction import PRESETS

from .tiny import length_reward, tiny_model, tiny_tokenizer


ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md"]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_inside_the_repository_lead_to_a_file(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_the_readmes_script_trains_with_its_model_and_data_swapped(tmp_path, monkeypatch):
    script, _ = blocks(ROOT / "README.md", "python")
    assert len(script.strip().splitlines()) <= 15
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tiny_model().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    questions = [[{"role": "user", "content": text}] for text in ("ab=", "cd=") * 8]
    rows = Dataset.from_dict({"prompt": questions, "solution": ["1", "2"] * 8})
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: rows)
    small = {"use_cpu": True, "bf16": False, "max_steps": 4, "max_completion_length": 4, "report_to": "none"}
    assert script.count("DROConfig(output_dir=") == 1
    script = script.replace("DROConfig(", f"DROConfig(**{small!r}, ").replace("Qwen/Qwen3-0.6B", f"{tmp_path}/model")
    with contextlib.chdir(tmp_path):
        names: dict = {}
        exec(compile(script, "README.md", "exec"), names)
    assert names["trainer"].state.global_step == 4
    assert names["trainer"].args.dro_beta == 0.5


def test_the_readmes_off_policy_settings_are_a_valid_configuration():
    _, settings = blocks(ROOT / "README.md", "python")
    config = eval(settings.replace("DROConfig(", "DROConfig(use_cpu=True, bf16=False, report_to='none', "))
    assert config.build_rollout_correction().level == "token"


def test_the_off_policy_page_names_every_preset_and_option():
    page = (ROOT / "docs" / "off_policy.md").read_text()
    for name in (*PRESETS, *CORRECTION_FIELDS, *BASELINES, "dro_target_kl", "dro_huber_delta"):
        assert f"`{name}`" in page or f"`{name}=" in page, name
    for value, beta in re.findall(
        r"^\| (?:Tinker|ROLL|prime-rl)[^|]*\| ([\d.]+)[^|]*\| token \| `dro_beta=([\d.]+)`", page, re.M
    ):
        assert float(beta) in (float(value), 2 * float(value))


def test_the_extending_page_trains_with_its_objective(tmp_path, monkeypatch, make_config):
    page = ROOT / "docs" / "extending.md"
    (code,) = blocks(page, "python")
    (settings,) = blocks(page, "yaml")
    (tmp_path / "my_losses.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = make_config(dro_beta=None, **yaml.safe_load(settings))
    rows = Dataset.from_dict({"prompt": ["ab=", "cd="] * 8})
    trainer = DROTrainer(tiny_model(), length_reward, config, rows, processing_class=tiny_tokenizer())
    trainer.train()
    assert trainer.state.log_history[1]["squashed/pull"] > 0


def test_the_page_of_objectives_has_every_name_alias_and_parameter():
    page = (ROOT / "docs" / "objectives.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    for name in list_policy_losses():
        (row,) = [row for row in rows if f"`{name}`" in row.split("|")[1]]
        for alias in policy_loss_aliases(name):
            assert f"`{alias}`" in row
        for parameter in policy_loss_parameters(resolve_policy_loss(name)):
            assert f"`{parameter.name}" in row, (name, parameter.name)


def test_what_the_migration_page_names_is_accepted():
    page = (ROOT / "docs" / "migrating.md").read_text()
    for name in re.findall(r'`policy_loss="(\w+)"`', page):
        get_policy_loss(name)
    for mode in re.findall(r'loss_agg_mode="([\w-]+)"', page):
        DROConfig(use_cpu=True, bf16=False, dro_beta=0.5, num_iterations=2, loss_agg_mode=mode, max_grad_norm=0.0)


def test_the_numbers_for_choosing_beta_follow_from_its_formula():
    for page in (ROOT / "README.md", ROOT / "docs" / "choosing_beta.md"):
        section = page.read_text().split("Choosing dro_beta\n", 1)[1]
        rows = re.findall(r"^\| ([\d.]+) \| ([\d.]+) \| ×?([\d.]+)", section, flags=re.MULTILINE)
        assert len(rows) >= 3
        for beta, rest, ratio in rows:
            assert float(rest) == pytest.approx(0.5 / float(beta))
            assert float(ratio) == pytest.approx(2.718281828 ** float(rest), rel=5e-3)


def test_every_metric_of_a_run_stands_on_the_page_of_metrics(make_config):
    page = (ROOT / "docs" / "metrics.md").read_text()
    trainer = DROTrainer(
        tiny_model(),
        length_reward,
        make_config(),
        Dataset.from_dict({"prompt": ["ab="] * 8}),
        processing_class=tiny_tokenizer(),
    )
    trainer.train()
    for name in trainer.state.log_history[1]:
        if name.startswith("dro/") or name in ("policy_loss", "entropy"):
            short = re.sub(r"^dro/log_ratio(_\w+)$", r"\1", name)
            assert f"`{name}`" in page or f"`{short}`" in page, name


@pytest.mark.parametrize(
    "recipe", sorted((ROOT / "recipes").rglob("*.yaml")), ids=lambda path: path.parent.parent.name
)
def test_a_recipe_has_three_commented_sections_and_says_how_to_run_it(recipe):
    text = recipe.read_text()
    assert re.findall(r"^# ---- (\w+) ----$", text, flags=re.MULTILINE) == ["Model", "Data", "Training"]
    assert f"--config {recipe.relative_to(ROOT)}" in text
    assert "Hardware:" in text


def test_the_parser_prints_every_option_of_ours():
    text = DROParser((DROConfig,)).format_help()
    for name in ("--policy_loss", "--dro_beta", "--dro_level", "--loss_agg_mode", "--anchor_policy"):
        assert name in text


def test_the_tables_of_memory_are_what_the_script_prints():
    from .benchmarks import memory

    page = (ROOT / "docs" / "distributed.md").read_text()
    assert memory.state_table() in page
    assert memory.pick_table() in page


def test_the_page_on_launching_names_every_configuration_and_job():
    page = (ROOT / "docs" / "distributed.md").read_text()
    names = {path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml")}
    assert set(re.findall(r"`((?:cpu|multi|single|zero|fsdp)\w*)`", page.partition("## What is the same")[0])) == names
    for job in (ROOT / "recipes" / "slurm").glob("*.slurm"):
        assert job.name in page
