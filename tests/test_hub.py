"""What goes to the Hub, and what lies on disk to go there: right, whole and without secrets."""

import copy
import dataclasses
import io
import math
import re

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from peft import AutoPeftModelForCausalLM, LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOTrainer

from trl_dro import DROConfig, DROTrainer, cli, model_card
from trl_dro import train as train_script
from trl_dro.checkpoints import MARKER, newest_complete, what_is_missing
from trl_dro.objectives import DRO
from trl_dro.redaction import without_places, without_secrets
from trl_dro.steering import temporarily
from trl_dro.train_arguments import parse

from .hub import local_hub
from .test_cli import SMALL
from .test_trainer import make_trainer
from .tiny import FAST, length_reward, prompts, tiny_model, tiny_tokenizer


TOKEN = "hf_aVerySecretTokenOfNobody"
OTHER_SECRET = "sk-another-secret"
# Two checkpoints, at steps 2 and 4.
PUSHED = {
    "push_to_hub": True,
    "hub_model_id": "me/tiny-dro",
    "hub_token": TOKEN,
    "save_strategy": "steps",
    "save_steps": 2,
    "hub_always_push": True,
}
LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", "init_lora_weights": False}


@dataclasses.dataclass(frozen=True)
class Judged:
    """An objective of somebody's own, with a secret among its parameters."""

    api_key: str
    beta: float = 0.5

    def __call__(self, inputs):
        return DRO(beta=self.beta)(inputs)


@pytest.fixture
def hub(monkeypatch):
    with local_hub(monkeypatch) as hub:
        yield hub


def holding(folder, *secrets: str) -> list[str]:
    """The files under a folder that hold one of these texts."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return [path.name for path in files if any(secret.encode() in path.read_bytes() for secret in secrets)]


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(4, 12)[None]).logits


# Secrets


def test_transformers_pickles_the_token_next_to_every_model(build, tmp_path):
    trainer = build(GRPOTrainer, settings={"hub_token": TOKEN})
    trainer.save_model()
    assert holding(tmp_path, TOKEN) == ["training_args.bin"]


def test_no_file_holds_a_secret_and_the_token_still_works(make_config, hub, tmp_path):
    # Others too: TRL hands model_init_kwargs to from_pretrained, and a checkpoint notes the objective.
    secrets = {"model_init_kwargs": {"token": OTHER_SECRET}, "policy_loss_kwargs": {"api_key": OTHER_SECRET}}
    config = make_config(
        **PUSHED, hub_strategy="checkpoint", policy_loss=f"{__name__}.Judged", dro_beta=None, **secrets
    )
    tiny_model().save_pretrained(tmp_path / "model")
    trainer = make_trainer(config, model=str(tmp_path / "model"))
    trainer.train()
    trainer.save_model()
    trainer.push_to_hub()
    assert holding(tmp_path, TOKEN, OTHER_SECRET) == []
    assert {path.parent.name for path in tmp_path.rglob("training_args.bin")} == {
        "checkpoint-2",
        "checkpoint-4",
        "run",
    }
    assert not [name for name, content in hub.sent.items() if TOKEN.encode() in content]
    assert row(hub.card, "api_key") == "<API_KEY>"
    assert row(hub.card, "beta") == "0.5"
    assert ModelCard(hub.card).data.tags == ["generated_from_trainer", "trl", "trl-dro"]
    make_trainer(config, model=str(tmp_path / "model")).train(
        resume_from_checkpoint=str(tmp_path / "run/checkpoint-2")
    )
    assert trainer.args.hub_token == TOKEN
    assert trainer.policy_loss.api_key == OTHER_SECRET
    assert hub.tokens == {TOKEN}


def test_pickled_arguments_are_whole_but_for_the_secrets(make_config):
    config = make_config(hub_token=TOKEN, chat_template_kwargs={"api_key": OTHER_SECRET, "level": "token"})
    file = io.BytesIO()
    torch.save(config, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded.hub_token is None
    assert loaded.chat_template_kwargs == {"api_key": "<API_KEY>", "level": "token"}
    assert loaded.to_dict() == config.to_dict()
    assert loaded.average_tokens_across_devices == config.average_tokens_across_devices
    assert config.chat_template_kwargs["api_key"] == OTHER_SECRET


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, dataclasses.replace])
def test_copies_in_memory_keep_the_token(copied, make_config):
    config = make_config(hub_token=TOKEN, generation_kwargs={})
    twin = copied(config)
    assert twin is not config
    assert twin.hub_token == TOKEN
    assert twin.to_dict() == config.to_dict()
    assert (twin.generation_kwargs is config.generation_kwargs) == (copied is not copy.deepcopy)


def test_a_config_that_is_shown_or_logged_holds_no_secret(make_config):
    config = make_config(hub_token=TOKEN, model_init_kwargs={"token": OTHER_SECRET})
    for shown in (str(config), repr(config), config.to_json_string(), str(config.to_sanitized_dict())):
        assert TOKEN not in shown
        assert OTHER_SECRET not in shown
    assert DROConfig(**config.to_dict()).hub_token is None  # and not the text that stands for one


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ({"HF_TOKEN": "x", "n": 1}, {"HF_TOKEN": "<HF_TOKEN>", "n": 1}),
        ({"a": [{"aws_access_key_id": "x"}]}, {"a": [{"aws_access_key_id": "<AWS_ACCESS_KEY_ID>"}]}),
        ({"keys": ["x", "y"]}, {"keys": ["<KEYS>", "<KEYS>"]}),
        ({"password": {"of": ("x",)}}, {"password": {"of": ("<PASSWORD>",)}}),
        ({"max_new_tokens": 5, "pad_token": None}, {"max_new_tokens": 5, "pad_token": None}),
        ({"include_num_input_tokens_seen": "all", "dro_level": "token"},) * 2,
        (f"http://me:word@host:80/{TOKEN}", "http://host:80/<TOKEN>"),
        ({"policy": "the hf_model"},) * 2,
        (
            {"Proxy-Authorization": "x", "auth": "y"},
            {"Proxy-Authorization": "<PROXY-AUTHORIZATION>", "auth": "<AUTH>"},
        ),
        ({"pwd": "x", "DB_PASSWD": "y"}, {"pwd": "<PWD>", "DB_PASSWD": "<DB_PASSWD>"}),
        ({"bearer": "x", "apikey": "y"}, {"bearer": "<BEARER>", "apikey": "<APIKEY>"}),
        ({"keywords": ["x"], "author": "y", "tokenizer": "z", "eos_token": "</s>"},) * 2,
    ],
)
def test_secrets_are_known_by_name_or_form(value, shown):
    assert without_secrets(value) == shown


def test_absolute_paths_are_cut_to_their_last_component():
    assert without_places({"model": "/home/me/model/", "id": "me/model", "n": ["/a/b"]}) == {
        "model": "model",
        "id": "me/model",
        "n": ["b"],
    }


# What is pushed


@pytest.mark.parametrize(
    ("strategy", "folders"),
    [
        ("end", set()),
        ("every_save", set()),
        ("checkpoint", {"last-checkpoint"}),
        ("all_checkpoints", {"checkpoint-2", "checkpoint-4"}),
    ],
)
def test_a_strategy_pushes_what_it_says_and_only_whole_checkpoints(strategy, folders, make_config, hub, tmp_path):
    trainer = make_trainer(make_config(**PUSHED, hub_strategy=strategy))
    hub.look = lambda: newest_complete(tmp_path / "run")
    (tmp_path / "run" / "_private").mkdir(parents=True)
    (tmp_path / "run" / "_private" / "notes.txt").write_text("not for others")
    trainer.train()
    during = len(hub.commits)
    uploads = 1 if strategy == "every_save" else 2
    assert during == (0 if strategy == "end" else 2 * uploads)
    # at every upload the newest checkpoint on disk was whole
    expected = [step for step in (2, 4) for _ in range(uploads)] if during else []
    assert hub.seen == [(str(tmp_path / "run" / f"checkpoint-{step}"), {}) for step in expected]
    trainer.push_to_hub()
    assert len(hub.commits) == during + 1
    assert hub.commits[-1].message == "End of training"
    assert set(hub.repositories) == {"me/tiny-dro"}
    top = {name for name in hub.sent if "/" not in name}
    assert top == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "training_args.bin",
    }
    assert {name.split("/")[0] for name in hub.sent if "/" in name} == folders
    for name in folders:
        folder = hub.download(tmp_path / "downloaded" / name, under=name)
        assert (folder / MARKER).is_file()
        assert what_is_missing(folder) is None
    assert {"trl", "dro", "trl-dro"} <= set(ModelCard(hub.card).data.tags)


def test_a_run_goes_on_from_a_checkpoint_that_was_pushed(make_config, hub, tmp_path):
    first = make_trainer(make_config(**PUSHED, hub_strategy="checkpoint"))
    first.train()
    folder = hub.download(tmp_path / "last-checkpoint", under="last-checkpoint")
    again = make_trainer(make_config(output_dir=str(tmp_path / "again"), max_steps=6))
    again.train(resume_from_checkpoint=str(folder))
    assert again.state.global_step == 6


def test_a_pushed_model_gives_the_logits_of_the_trained_one(make_config, hub, tmp_path):
    trainer = make_trainer(make_config(**PUSHED))
    trainer.train()
    trainer.push_to_hub()
    folder = hub.download(tmp_path / "downloaded")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder)), logits(trainer.model))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("ab=").input_ids == tiny_tokenizer()("ab=").input_ids


def test_a_pushed_adapter_has_peft_s_layout_and_gives_the_same_logits(make_config, hub, tmp_path):
    tiny_model().save_pretrained(tmp_path / "base")
    config = make_config(**PUSHED, hub_strategy="checkpoint")
    trainer = make_trainer(config, model=str(tmp_path / "base"), peft_config=LoraConfig(**LORA))
    trainer.train()
    during = {name for name in hub.sent if "/" not in name}
    trainer.push_to_hub()
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= during
    assert {name for name in hub.sent if "/" not in name} == during
    assert "model.safetensors" not in hub.sent
    assert {"adapter_config.json", "adapter_model.safetensors", MARKER} <= {
        name.removeprefix("last-checkpoint/") for name in hub.sent if "/" in name
    }
    for under in ("", "last-checkpoint"):
        folder = hub.download(tmp_path / f"downloaded{under}", under=under)
        reloaded = AutoPeftModelForCausalLM.from_pretrained(folder)
        torch.testing.assert_close(logits(reloaded), logits(trainer.model), rtol=0, atol=1e-6)
    card = ModelCard(hub.card)
    assert card.data.library_name == "peft"
    assert {"trl", "dro", "trl-dro", "lora"} <= set(card.data.tags)
    for name in ("README.md", "last-checkpoint/README.md"):
        card = hub.sent[name].decode()
        assert str(tmp_path) not in card
        assert row(card, "dro_beta") == "0.5"
    with temporarily(trainer.args, push_to_hub=False):
        trainer.save_model()
    assert (tmp_path / "run" / "README.md").read_text() == hub.card


def test_a_push_that_failed_in_the_background_is_reported_and_training_goes_on(make_config, hub, tmp_path):
    class Wait(TrainerCallback):
        """For an upload, so that the next one takes its place."""

        def on_step_begin(self, *args, **kwargs):
            if trainer.push_in_progress is not None:
                trainer.push_in_progress.wait_until_done()

    trainer = make_trainer(make_config(**PUSHED), callbacks=[Wait()])
    hub.refuses = True
    with pytest.warns(UserWarning, match=r"A push to me/tiny-dro in the background failed .*403") as caught:
        trainer.train()
    hub.refuses = False
    trainer.push_to_hub()  # has nothing to warn of
    assert len([one for one in caught if "A push to" in str(one.message)]) == 2  # each of them once
    assert trainer.state.global_step == 4
    assert newest_complete(tmp_path / "run")[0] == str(tmp_path / "run" / "checkpoint-4")
    assert [commit.message for commit in hub.commits] == ["End of training"]


# The model card


def card_of(config: DROConfig, history=(), **kwargs) -> str:
    return model_card.describe(config, history, **kwargs)


def row(card: str, name: str) -> str:
    """The value of a setting in the card's table."""
    return re.search(rf"^\| {re.escape(name)} \| (.*) \|$", card, flags=re.MULTILINE)[1]


def curve(card: str) -> list[list[str]]:
    table = card.split("### Learning curve")[1].split("### Recipe")[0]
    return [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|") and "---" not in line]


def test_a_card_says_what_the_run_is(build, tmp_path):
    trainer = build(DROTrainer, settings={"learning_rate": 1e-3})
    trainer.train()
    trainer.create_model_card(model_name="mine", dataset_name="me/data", tags="more")
    text = (tmp_path / "run" / "README.md").read_text()
    card = ModelCard(text)
    assert {"trl", "dro", "trl-dro", "more"} <= set(card.data.tags)
    assert card.data.tags == sorted(card.data.tags)
    assert card.data.datasets == "me/data"
    assert "trained with Direct Reward Optimization (DRO), a method introduced in [Offline Regularised" in text
    for paper in ("2405.19107", "2501.12599", "@software{vonwerra2020trl"):
        assert paper in text
    assert row(text, "dro_beta") == "0.5"
    assert row(text, "dro_level") == "token"
    assert row(text, "loss_agg_mode") == "token-mean"
    assert row(text, "anchor_policy").startswith("old: ")
    assert row(text, "advantage_baseline") == "mean"
    assert row(text, "rollout correction") == "none"
    assert row(text, "optimizer steps on each generated batch") == "2"
    assert [line[0] for line in curve(text)] == ["up to step", "2"]
    assert float(curve(text)[1][2]) > 0  # the steps after the one that scored, too
    assert "None" not in text.split("### Objective")[0]
    assert "user" not in text.split("## Training procedure")[0]  # this tokenizer has no chat template
    assert text.index("### Recipe") < text.index("### Framework versions") < text.index("- trl_dro: ")


def test_the_example_of_a_chat_model_asks_with_messages(build, tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    build(DROTrainer, tokenizer=tokenizer).create_model_card(model_name="mine")
    text = (tmp_path / "run" / "README.md").read_text()
    assert 'generator([{"role": "user", "content": question}]' in text
    assert 'model="mine"' in text
    assert "### Learning curve" not in text  # nothing is trained yet


def test_a_card_of_another_objective_does_not_claim_dro(build, tmp_path):
    config = DROConfig(
        **{**FAST, "output_dir": str(tmp_path / "run"), "num_iterations": 2},
        policy_loss="ppo_clip",
        policy_loss_kwargs={"epsilon_low": 0.1},
    )
    trainer = DROTrainer(
        model=tiny_model(),
        reward_funcs=length_reward,
        args=config,
        train_dataset=prompts(),
        processing_class=tiny_tokenizer(),
    )
    trainer.create_model_card(model_name="mine")
    text = (tmp_path / "run" / "README.md").read_text()
    for claim in ("2405.19107", "2501.12599", "Direct Reward", "dro_beta", "dro_level", "GRPO"):
        assert claim not in text
    assert "trained with `ppo_clip`.\n" in text
    assert "1707.06347" in text
    assert row(text, "epsilon_low") == "0.1"
    assert {"trl", "trl-dro", "ppo_clip"} <= set(ModelCard(text).data.tags)
    assert "dro" not in ModelCard(text).data.tags
    assert set(trainer.model.model_tags) == {"trl", "trl-dro", "ppo_clip"}


def test_an_adapted_beta_is_given_with_its_target_and_where_it_is_now(make_config):
    config = make_config(dro_target_kl=0.02, num_iterations=4)
    assert row(card_of(config, dro_beta=0.7512345), "dro_beta") == (
        "0.5 at first, 0.7512 now: adapted to a mean l² / 2 of 0.02"
    )


def test_a_trained_card_has_the_beta_that_the_controller_came_to(make_config, tmp_path):
    trainer = make_trainer(make_config(dro_target_kl=1e-4, num_iterations=4, max_steps=8))
    trainer.train()
    trainer.create_model_card(model_name="mine")
    text = (tmp_path / "run" / "README.md").read_text()
    beta = trainer._adaptive_beta.beta
    assert beta != 0.5
    assert f"{beta:.4g} now" in row(text, "dro_beta")
    assert curve(text)[0] == ["up to step", "reward", "dro/kl_k2", "dro/beta"]


def test_settings_that_matter_are_in_the_table(make_config):
    card = card_of(
        make_config(
            rollout_is="token",
            rollout_is_threshold=3.0,
            advantage_baseline="soft",
            advantage_baseline_temperature=0.25,
            anchor_policy="reference",
            loss_agg_mode="seq-mean-token-sum-norm",
            loss_scale_factor=64,
            dro_level="sequence",
            dro_huber_delta=2.0,
            beta=0.04,
            steps_per_generation=2,
        )
    )
    assert row(card, "rollout correction") == "rollout_is='token', rollout_is_threshold=3.0"
    assert row(card, "advantage_baseline") == "soft, temperature 0.25"
    assert row(card, "anchor_policy") == "reference: the reference model"
    assert row(card, "loss_agg_mode") == "seq-mean-token-sum-norm with loss_scale_factor=64"
    assert row(card, "dro_level") == "sequence"
    assert row(card, "dro_huber_delta") == "2"
    assert row(card, "beta (KL to the reference model)") == "0.04"
    assert row(card, "optimizer steps on each generated batch") == "4"


@pytest.mark.parametrize(("count", "rows"), [(1, 1), (2, 2), (12, 12), (13, 12), (500, 12)])
def test_a_learning_curve_has_at_most_twelve_rows_up_to_the_last_step(count, rows, make_config):
    history = [{"step": step + 1, "reward": step / 10, "dro/kl_k2": 1e-5, "loss": 0.0} for step in range(count)]
    head, *body = curve(card_of(make_config(), history))
    assert head == ["up to step", "reward", "dro/kl_k2"]
    steps = [int(line[0]) for line in body]
    assert len(steps) == len(set(steps)) == rows
    assert steps[-1] == count
    weights = [last - first for first, last in zip([0, *steps], steps, strict=False)]
    mean = sum(weight * float(line[1]) for weight, line in zip(weights, body, strict=True)) / count
    assert mean == pytest.approx((count - 1) / 20, rel=1e-2)


def test_a_row_is_the_mean_over_all_steps_that_used_its_completions(make_config):
    history = [
        {"step": 1, "reward": 0.25, "dro/kl_k2": 0.0},
        {"step": 2, "dro/kl_k2": 0.5},
        {"step": 2, "eval_reward": 1.0},
        {"step": 3, "reward": 0.75, "dro/kl_k2": 0.0},
        {"step": 4, "dro/kl_k2": 0.25},
    ]
    assert curve(card_of(make_config(), history))[1:] == [["2", "0.25", "0.25"], ["4", "0.75", "0.125"]]


def test_rewards_that_are_missing_are_shown_as_none(make_config):
    history = [
        {"step": 1, "reward": math.nan},
        {"step": 2, "reward": None},
        {"step": 3, "reward": 0.5, "dro/kl_k2": math.inf},
        {"step": 3, "train_runtime": 1.0},
        {"step": 3, "eval_reward": None, "eval_reward_std": None},
    ]
    card = card_of(make_config(), history)
    assert curve(card)[1:] == [["1", "none", "none"], ["2", "none", "none"], ["3", "0.5", "inf"]]
    assert "Held-out `eval_reward`: none at step 3." in card


def test_held_out_rewards_are_shown_before_and_after_for_every_dataset(make_config):
    history = [
        {"step": 0, "eval_math_reward": 0.1, "eval_math_reward_std": 0.1, "eval_rewards/my_reward": 1.0},
        {"step": 5, "eval_math_reward": 0.2, "eval_math_reward_std": 0.1},
        {"step": 9, "eval_math_reward": 0.75, "eval_math_reward_std": 0.1},
        {"step": 9, "eval_code_reward": 0.5, "eval_code_reward_std": 0.1},
    ]
    card = card_of(make_config(), history)
    assert "Held-out `eval_math_reward`: 0.1 at step 0, 0.75 at step 9." in card
    assert "Held-out `eval_code_reward`: 0.5 at step 9." in card
    assert card.count("Held-out") == 2


@pytest.mark.parametrize("metric", [None, "reward", "eval_reward"])
def test_a_card_of_the_best_weights_says_which_they_are(metric, make_config, tmp_path):
    config = make_config(
        save_strategy="steps",
        save_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=4,
        load_best_model_at_end=True,
        metric_for_best_model=metric,
        max_steps=2,
    )
    trainer = make_trainer(config, eval_dataset=prompts(4))
    trainer.train()
    trainer.create_model_card(model_name="mine")
    text = (tmp_path / "run" / "README.md").read_text()
    assert f"The weights are those of step {trainer.state.best_global_step}, the best by `eval_reward`." in text


def test_the_recipe_of_a_script_makes_the_same_configuration(make_config):
    config = make_config(
        hub_token=TOKEN,
        hub_model_id="me/secret-project",
        report_to="none",
        num_iterations=4,
        dro_target_kl=0.02,
        rollout_rs=["seq_mean_k3"],
        rollout_rs_threshold=[0.01],
        chat_template_kwargs={"text": "`` | ```\nline", "api_key": OTHER_SECRET, "file": "/home/me/notes"},
        eval_strategy="steps",
        eval_steps=2,
        model_init_kwargs={"token": OTHER_SECRET},
    )
    card = card_of(config)
    for kept_back in (TOKEN, OTHER_SECRET, "secret-project", str(config.output_dir), "/home/me"):
        assert kept_back not in card
    recipe = re.search(r"^(`{4,})python\n(.*?)^\1$", card, flags=re.DOTALL | re.MULTILINE)[2]
    assert re.search(r"^    dro_target_kl=0.02,$", recipe, flags=re.MULTILINE)
    made = eval(recipe)
    left_out = {"output_dir", "hub_model_id", "model_init_kwargs", "chat_template_kwargs", "disable_tqdm", "run_name"}
    assert made.model_init_kwargs == {"token": "<TOKEN>"}
    differing = {name for name, value in config.to_dict().items() if made.to_dict()[name] != value}
    assert differing <= left_out


def test_the_recipe_of_the_command_is_a_file_for_it(tmp_path):
    path = tmp_path / "config.yaml"
    given = {
        **SMALL,
        "output_dir": str(tmp_path / "run"),
        "tiny_prompt_template": "{metadata[word]}=",
        "use_peft": True,
        "lora_target_modules": ["q_proj"],
        "learning_rate": 1e-5,
        "eval_strategy": "no",
        "num_iterations": 4,
        "dro_target_kl": 0.02,
        "hub_token": TOKEN,
    }
    path.write_text(yaml.safe_dump(given))
    script, config, model, data = parse(["--config", str(path)])
    recipe = model_card.recipe_as_yaml(model, script, data, config)
    assert TOKEN not in recipe
    assert str(tmp_path) not in recipe
    # nothing that was not written
    assert set(yaml.safe_load(recipe)) <= set(given)
    path.write_text(recipe)
    again = parse(["--config", str(path), "--output_dir", str(tmp_path / "run")])
    for before, after in zip((script, config, model, data), again, strict=True):
        for name in dataclasses.asdict(before) if before is not config else config.to_dict():
            if name not in ("disable_tqdm", "hub_token"):
                assert getattr(after, name) == getattr(before, name), name


# The command


def test_the_command_pushes_once_with_everything_in_the_card(hub, tmp_path, capsys):
    path = tmp_path / "config.yaml"
    settings = {**SMALL, "output_dir": str(tmp_path / "run"), **PUSHED, "show_completions": 0}
    path.write_text(yaml.safe_dump(settings))
    assert cli.main(["train", "--config", str(path)]) == 0
    assert [commit.message for commit in hub.commits] == ["Training in progress, step 2", "End of training"]
    card = hub.card
    assert {"trl", "dro", "trl-dro"} <= set(ModelCard(card).data.tags)
    assert re.search(r"Held-out `eval_reward`: \S+ at step 0, \S+ at step 2\.", card)
    assert [line[0] for line in curve(card)] == ["up to step", "2"]
    recipe = yaml.safe_load(re.search(r"```yaml\n(.*?)```", card, flags=re.DOTALL)[1])
    assert recipe["task"] == "spell_backward"
    assert recipe["model_name_or_path"] == "tiny-qwen3"
    assert not {"push_to_hub", "hub_token", "hub_model_id", "output_dir"} & recipe.keys()
    assert "trainer_state.json" in hub.sent
    assert holding(tmp_path / "run", TOKEN) == []
    folder = hub.download(tmp_path / "downloaded")
    assert AutoModelForCausalLM.from_pretrained(folder).config.model_type == "qwen3"


def test_the_command_names_a_dataset_of_the_hub_and_no_path(tmp_path, monkeypatch):
    named = []

    class Trainer:
        state = type("State", (), {"global_step": 0, "log_history": []})
        eval_dataset = None
        accelerator = type("Accelerator", (), {"is_main_process": False})

        def push_to_hub(self, dataset_name):
            named.append(dataset_name)

        def __getattr__(self, name):
            return lambda *args, **kwargs: None

    monkeypatch.setattr(train_script, "_build", lambda *arguments: (None, Trainer()))
    for name in ("me/data", str(tmp_path)):
        script = train_script.DROScriptArguments(dataset_name=name)
        config = DROConfig(**{**FAST, **PUSHED, "save_strategy": "no"}, dro_beta=0.5, output_dir=str(tmp_path))
        assert train_script.run(script, config, train_script.ModelConfig(), train_script.DatasetMixtureConfig()) == 0
    assert named == ["me/data", None]
