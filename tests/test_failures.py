"""A reward function that fails on one process of two ends both, with one error. The file is its own child script."""

import asyncio
import json
import os
import re
import signal
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType

from trl_dro import DROConfig, failures, reward_checks
from trl_dro.reward_checks import checked_reward

from .forks import forked, run_module
from .test_trainer import make_trainer
from .tiny import FAST, length_reward


def raising(**_):
    raise RuntimeError("the judge is out")


async def raising_later(**_):
    await asyncio.sleep(0.01)
    raise RuntimeError("the judge is out")


def hanging(completions, **_):
    time.sleep(600)


async def hanging_async(completions, **_):
    await asyncio.sleep(600)


async def blocking_async(completions, **_):
    time.sleep(600)


def raising_then_hanging(completions, **_):
    if len(completions) > 1:
        raise RuntimeError("the judge is out")
    time.sleep(600)


async def raising_then_hanging_async(completions, **_):
    if len(completions) > 1:
        raise RuntimeError("the judge is out")
    await asyncio.sleep(600)


def infinite(completions, **_):
    return [float("inf")] * len(completions)


def too_few(completions, **_):
    return [1.0]


# What the reward function of one process does in its second call, and what is said of it.
FAILURES = {
    "raises": (raising, "RuntimeError: the judge is out"),
    "raises later": (raising_later, "RuntimeError: the judge is out"),
    "hangs": (hanging, r"TimeoutError: reward function 'reward' at step 2 did not return within reward_timeout=1 sec"),
    "hangs, async": (hanging_async, "TimeoutError: reward function 'reward' at step 2 did not return within reward_t"),
    "blocks, async": (
        blocking_async,
        "TimeoutError: reward function 'reward' at step 2 did not return within .* an `async def` that waits without",
    ),
    "raises, then hangs": (raising_then_hanging, "RuntimeError: the judge is out"),
    "returns infinity": (infinite, "ValueError: reward function 'reward' at step 2 returned inf for row 0"),
    "returns too few": (
        too_few,
        "ValueError: reward function 'reward' at step 2 returned 1 rewards for 4 comple",
    ),
}


def train(directory: Path, failing: str, ranks: tuple[int, ...]) -> None:
    rank = int(os.environ["RANK"])
    os.dup2(os.open(directory / f"stderr_{rank}", os.O_WRONLY | os.O_CREAT), 2)
    failures._SECONDS_TO_REPORT = reward_checks._SECONDS_TO_CANCEL = 1.0
    fail, calls = FAILURES[failing][0], []

    def reward(**kwargs):
        calls.append(1)
        return fail(**kwargs) if len(calls) >= 2 and rank in ranks else length_reward(**kwargs)

    async def reward_async(**kwargs):
        result = reward(**kwargs)
        return await result if asyncio.iscoroutine(result) else result

    reward_async.__name__ = "reward"
    reward_func = reward_async if asyncio.iscoroutinefunction(fail) else reward
    settings = {**FAST, "per_device_train_batch_size": 4, "reward_timeout": 1.0, "ddp_timeout": 60}
    config = DROConfig(output_dir=str(directory / "run"), dro_beta=0.5, **settings)
    trainer = make_trainer(config, reward_funcs=reward_func)
    assert trainer.accelerator.num_processes == torch.distributed.get_world_size() == 2
    assert trainer.accelerator.distributed_type == DistributedType.MULTI_CPU
    trainer.train()


def main(directory: Path) -> None:
    results = {}
    for failing in FAILURES:
        for ranks in ((0,), (1,), (0, 1)) if failing == "raises" else ((1,),):
            name = f"{failing} on {ranks}"
            run = directory / name.replace(" ", "_")
            run.mkdir()
            began = time.monotonic()
            codes = forked(partial(train, run, failing, ranks), 2)
            said = [(run / f"stderr_{rank}").read_text() for rank in (0, 1)]
            results[name] = {"codes": codes, "stderr": said, "seconds": time.monotonic() - began}
    (directory / "results.json").write_text(json.dumps(results))


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    directory = tmp_path_factory.mktemp("failures")
    run_module("tests.test_failures", directory)
    return json.loads((directory / "results.json").read_text())


CASES = [("raises", (0,)), ("raises", (0, 1)), *((failing, (1,)) for failing in FAILURES)]


@pytest.mark.parametrize(("failing", "ranks"), CASES, ids=[f"{failing} on {ranks}" for failing, ranks in CASES])
def test_all_processes_end_with_one_error(results, failing, ranks):
    result = results[f"{failing} on {ranks}"]
    assert result["codes"][ranks[0]] == 1
    assert result["codes"][1 - ranks[0]] in (1, -signal.SIGKILL)  # by itself, or by the launcher
    assert result["seconds"] < 40  # not the 60 of the process group
    said = result["stderr"][ranks[0]]
    assert re.search(FAILURES[failing][1], said)
    if failing == "blocks, async":  # nothing can end it but its process, which tells the other nothing
        return
    assert f"On process {ranks[0]} of 2; it ends them all." in said
    assert "Traceback" not in result["stderr"][1 - ranks[0]]


# One process


def test_a_reward_function_that_hangs_ends_the_run(make_config):
    with pytest.raises(TimeoutError, match=r"'hanging' at step 0 did not return within reward_timeout=0\.2 seconds"):
        make_trainer(make_config(reward_timeout=0.2), reward_funcs=hanging).train()
    with pytest.raises(TimeoutError, match="'hanging_async' at step 0 did not return within"):
        make_trainer(make_config(reward_timeout=0.2), reward_funcs=hanging_async).train()


@pytest.mark.parametrize("reward", [raising_then_hanging, raising_then_hanging_async])
def test_the_search_for_the_row_that_raises_keeps_the_limit(make_config, reward):
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="the judge is out") as raised:
        make_trainer(make_config(reward_timeout=0.2), reward_funcs=reward).train()
    assert time.monotonic() - began < 30
    assert f"Raised by reward function {reward.__name__!r} at step 0." in raised.value.__notes__


def test_a_limit_changes_nothing_for_a_function_that_keeps_it(make_config):
    rewards = []
    for timeout in (None, 30.0):
        trainer = make_trainer(make_config(reward_timeout=timeout))
        trainer.train()
        rewards.append([log["reward"] for log in trainer.state.log_history if "reward" in log])
    assert rewards[0] == rewards[1]
    with pytest.raises(RuntimeError, match="the judge is out") as raised:
        make_trainer(make_config(reward_timeout=30.0), reward_funcs=raising).train()
    assert "Raised by reward function 'raising' at step 0." in raised.value.__notes__


def test_a_limit_hides_no_exit():
    def leaving(completions, **_):
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        checked_reward(leaving, "leaving", 5.0)(prompts=["a"], completions=["b"])


def test_a_timeout_of_the_functions_own_is_its_error():
    def own(completions, **_):
        raise TimeoutError("the judge did not answer")

    for timeout in (None, 5.0):
        with pytest.raises(TimeoutError, match="the judge did not answer"):
            checked_reward(own, "own", timeout)(prompts=["a"], completions=["b"])


@pytest.mark.parametrize("value", [0, -1.0, "soon", float("inf")])
def test_a_limit_that_is_none_is_refused(make_config, value):
    with pytest.raises(ValueError, match=r"^reward_timeout=.* is refused: it must be a finite number > 0 or None"):
        make_config(reward_timeout=value)


# A server


class DeadServer:
    """Stands in for TRL's connection to a vLLM server, which dies after the first batch."""

    mode = "processed_logprobs"

    def __init__(self, **_):
        self.calls = 0
        info = {"model_config": {"logprobs_mode": self.mode}}
        self.vllm_client = SimpleNamespace(get_server_info=lambda: info)

    def sync_weights(self):
        pass

    def generate(self, prompts, **_):
        self.calls += 1
        if self.calls > 1:
            raise OSError("HTTPConnectionPool(host='10.0.0.7', port=8000): Max retries exceeded")
        return prompts, [[5, 6, 2] for _ in prompts], [[[-1.0]] * 3 for _ in prompts], None


def test_a_server_that_dies_is_named_with_what_to_do(make_config, monkeypatch):
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", DeadServer)
    config = make_config(use_vllm=True, vllm_mode="server", vllm_server_base_url="http://10.0.0.7:8000")
    trainer = make_trainer(config)
    message = r"server at http://10\.0\.0\.7:8000 does not answer at step 2 \(OSError\).*resume_from_checkpoint=True"
    with pytest.raises(ConnectionError, match=message):
        trainer.train()


class FailingServer(DeadServer):
    """Answers the second batch with an error, as TRL's client reports it."""

    def generate(self, prompts, **_):
        try:
            return super().generate(prompts)
        except OSError:
            raise Exception("Request failed: 500, CUDA out of memory, hf_abcdefgh12345678") from None


def test_a_server_that_answers_with_an_error_is_named_with_what_to_do(make_config, monkeypatch):
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", FailingServer)
    config = make_config(use_vllm=True, vllm_mode="server", vllm_server_base_url="http://10.0.0.7:8000")
    trainer = make_trainer(config)
    message = r"7:8000 answers with an error at step 2 \('Request failed: 500, CUDA.*<TOKEN>.*resume_from_checkpoint"
    with pytest.raises(ConnectionError, match=message):
        trainer.train()


@pytest.mark.parametrize("settings", [{"anchor_policy": "sampling"}, {"rollout_is": "token"}, {}], ids=str)
def test_log_probs_that_a_server_does_not_sample_with_draw_a_warning(make_config, monkeypatch, settings):
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", DeadServer)
    config = make_config(use_vllm=True, vllm_mode="server", **settings)
    make_trainer(config)
    monkeypatch.setattr(DeadServer, "mode", "raw_logprobs")
    if settings:
        with pytest.warns(UserWarning, match="--logprobs-mode raw_logprobs"):
            make_trainer(config)
    else:  # TRL warns in its log
        make_trainer(config)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
