"""Adapters on every engine: fresh, continued, named, with whole modules; saved, loaded again, merged.

The file is its own child script, `python -m tests.test_adapters ENGINE DIRECTORY`, launched once for each engine.
"""

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM
from trl import ModelConfig, get_peft_config, get_quantization_config

from trl_dro import DROConfig, DROTrainer

from .cpu_engines import ONE, TYPES, keep_fsdp_on_cpu, launched_once
from .test_engines import gathered
from .test_trainer import scripted_rollout
from .tiny import FAST, length_reward, prompts, tiny_model, tiny_tokenizer


LORA = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
PENALISED = {"beta": 0.1, "use_bias_correction_kl": False}

# What the trainer is given, and with which settings.
CASES: dict[str, dict[str, Any]] = {
    "fresh": {},
    "fresh, with a KL term": PENALISED,
    "fresh, anchored to the reference": {"anchor_policy": "reference"},
    "fresh, sequence level": {"dro_level": "sequence"},
    "continued": {},
    "continued, with a KL term": PENALISED,
    "continued, anchored to the reference": {"anchor_policy": "reference"},
    "named": {},
    "named, with a KL term": PENALISED,
    "whole modules": {},
    "whole modules, with a KL term": PENALISED,
}
# Resumed as well, from inside a generated batch.
RESUMED = ["fresh", "continued, with a KL term", "named", "whole modules"]
ENGINES = [ONE, "cpu_ddp", "cpu_fsdp2", "cpu_zero3"]


def make_base(directory: Path) -> None:
    """A model, and an adapter of it that does something."""
    tiny_model(num_hidden_layers=2).save_pretrained(directory / "base")
    tiny_tokenizer().save_pretrained(directory / "base")
    torch.manual_seed(1)
    adapter = get_peft_model(tiny_model(num_hidden_layers=2), LoraConfig(**LORA, init_lora_weights=False))
    adapter.save_pretrained(directory / "adapter")


def given(case: str, directory: Path) -> dict[str, Any]:
    """Model and adapter as a user would pass them."""
    kind = case.partition(",")[0]
    if kind in ("fresh", "whole modules"):
        modules = {"modules_to_save": ["lm_head"]} if kind == "whole modules" else {}
        return {"model": str(directory / "base"), "peft_config": LoraConfig(**LORA, **modules)}
    base = AutoModelForCausalLM.from_pretrained(directory / "base")
    if kind == "continued":
        return {"model": PeftModel.from_pretrained(base, directory / "adapter", is_trainable=True)}
    torch.manual_seed(0)
    return {"model": get_peft_model(base, LoraConfig(**LORA), adapter_name="policy")}


def train(engine: str, case: str, directory: Path, checkpoint: Path | None = None) -> dict[str, Any]:
    # Every trainer has an engine of its own, as in a process of its own.
    AcceleratorState._reset_state()
    GradientState._reset_state()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    settings = {
        **FAST,
        "output_dir": str(directory / "runs" / case),
        "save_strategy": "steps" if case in RESUMED else "no",
        "save_steps": 1,
        "ddp_timeout": 60,
        "shuffle_dataset": False,
        "per_device_train_batch_size": 8 // world_size,
        "gradient_accumulation_steps": 1,
        "optim": "sgd",
        "optim_args": "momentum=0.5",
        "learning_rate": 0.5,
        "dro_beta": 0.5,
        "max_steps": 4,
    }
    torch.manual_seed(0)
    trainer = DROTrainer(
        reward_funcs=length_reward,
        args=DROConfig(**{**settings, **CASES[case]}),
        train_dataset=prompts(),
        processing_class=tiny_tokenizer(),
        rollout_func=scripted_rollout,
        **given(case, directory),
    )
    trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    if engine != ONE:
        assert trainer.accelerator.num_processes == 2
        assert trainer.accelerator.state.distributed_type == TYPES[engine]
    trained = [name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad]
    if checkpoint is None:
        trainer.save_model(str(directory / case))
    held = gathered(trainer)
    logged = ("policy_loss", "kl", "dro/kl_k2", "grad_norm")
    logs = [{name: log[name] for name in logged if name in log} for log in trainer.state.log_history[:4]]
    return {"weights": {name: held[name] for name in trained}, "logs": logs}


def main(engine: str, directory: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    results: dict[Any, Any] = {}
    for case in CASES:
        results[case] = train(engine, case, directory)
    for case in RESUMED:
        results["resumed", case] = train(engine, case, directory, directory / "runs" / case / "checkpoint-1")
    if int(os.environ.get("RANK", "0")) == 0:
        torch.save(results, directory / "results.pt")
    if engine != ONE:
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return launched_once(tmp_path_factory, "tests.test_adapters", make_base)


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.tensor([[1, 5, 9, 13], [1, 6, 7, 8]])).logits


def plain(name: str) -> str:
    """A parameter's name without that of its adapter."""
    return name.replace(".policy", "").replace(".default", "").replace("_fsdp_wrapped_module.", "")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("engine", ENGINES)
def test_an_adapter_trains_alike_everywhere_and_loads_again(results, engine, case):
    run, alone = results(engine)[case], results(ONE)[case]
    directory = results(engine)["directory"]
    assert run["weights"].keys() == alone["weights"].keys()
    for mine, theirs in zip(run["logs"], alone["logs"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-6)
    for name, trained in run["weights"].items():
        torch.testing.assert_close(trained, alone["weights"][name], rtol=1e-4, atol=1e-6)

    saved = directory / case / "policy" if case.startswith("named") else directory / case
    assert (saved / "adapter_model.safetensors").exists()
    assert not (saved / "model.safetensors").exists()
    loaded = AutoPeftModelForCausalLM.from_pretrained(saved)
    parameters = {plain(name): parameter for name, parameter in loaded.named_parameters()}
    for name, trained in run["weights"].items():
        torch.testing.assert_close(parameters[plain(name)].detach(), trained, rtol=0, atol=0)
    base = AutoModelForCausalLM.from_pretrained(directory / "base")
    assert (logits(loaded) - logits(base)).abs().max() > 1e-3
    expected = logits(loaded)
    torch.testing.assert_close(logits(loaded.merge_and_unload()), expected, rtol=1e-4, atol=1e-5)
    if "KL term" in case:
        assert run["logs"][0]["kl"] == pytest.approx(0.0, abs=1e-6)
        assert run["logs"][3]["kl"] > 1e-6


@pytest.mark.parametrize("case", RESUMED)
@pytest.mark.parametrize("engine", ENGINES)
def test_an_adapter_goes_on_from_inside_a_generated_batch(results, engine, case):
    whole, resumed = results(engine)[case], results(engine)["resumed", case]
    assert len(resumed["logs"]) == 4  # the first was restored
    assert resumed["logs"] == whole["logs"]
    for name, trained in resumed["weights"].items():
        torch.testing.assert_close(trained, whole["weights"][name], rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["fresh", "continued", "named", "whole modules"])
def test_a_kl_term_changes_what_is_trained(results, kind):
    """The reference is where the adapter began, not the policy itself."""
    with_term, without = (results(ONE)[case]["weights"] for case in (f"{kind}, with a KL term", kind))
    assert max((with_term[name] - without[name]).abs().max() for name in without) > 1e-6


def test_the_options_of_qlora_are_those_of_trl():
    """bitsandbytes needs a GPU: here, that the options arrive as transformers' and peft's configurations."""
    options = ModelConfig(
        model_name_or_path="x", use_peft=True, load_in_4bit=True, lora_r=8, lora_target_modules=["q_proj"]
    )
    quantization, lora = get_quantization_config(options), get_peft_config(options)
    assert quantization.load_in_4bit
    assert quantization.bnb_4bit_quant_type == "nf4"
    assert (lora.r, lora.target_modules) == (8, "q_proj")


if __name__ == "__main__":
    if sys.argv[1] == "cpu_fsdp2":
        keep_fsdp_on_cpu()
    main(sys.argv[1], Path(sys.argv[2]))
