"""The engines of `accelerate_configs/cpu_*.yaml` on processes without a GPU, and what their parameters are whole."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor


ROOT = Path(__file__).parent.parent
TYPES = {
    "cpu_ddp": DistributedType.MULTI_CPU,
    "cpu_fsdp2": DistributedType.FSDP,
    "cpu_zero2": DistributedType.DEEPSPEED,
    "cpu_zero3": DistributedType.DEEPSPEED,
}


def what_is_missing(engine: str) -> str | None:
    """Why this engine cannot run here, None if it can."""
    if "zero" not in engine:
        return None
    if find_spec("deepspeed") is None:
        return "deepspeed is not installed (`pip install trl-dro[deepspeed]`)"
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        return "DeepSpeed needs a C++ compiler on a CPU"
    return None


def launch(engine: str | None, module: str, *arguments: str, timeout: float) -> None:
    """Run a module on the two processes of an engine, or on one without any. An error there is one here."""
    command = [sys.executable]
    if engine is not None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command += ["-m", "accelerate.commands.launch", "--config_file", f"accelerate_configs/{engine}.yaml"]
        command += ["--main_process_port", str(port)]
    child = subprocess.Popen(
        [*command, "-m", module, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1"},
        start_new_session=True,
    )
    try:
        output, _ = child.communicate(timeout=timeout)
    except BaseException:
        os.killpg(child.pid, signal.SIGKILL)  # a rank that is left hangs on to its port
        raise
    assert child.returncode == 0, output[-8000:]


def keep_fsdp_on_cpu() -> None:
    """Make accelerate do FSDP on a CPU, where it falls back to DDP. Call before anything makes its state."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    make = AcceleratorState.__init__

    def remade(self, *args, fsdp_plugin=None, **kwargs):
        make(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = remade


def whole(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of all elements, on every rank. All ranks must call it."""
    if any(hasattr(parameter, "ds_id") for parameter in parameters):
        import deepspeed

        with deepspeed.zero.GatheredParameters(parameters):
            return [parameter.detach().clone() for parameter in parameters]
    return [
        (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().clone()
        for parameter in parameters
    ]


def share_held(parameters: list[torch.Tensor]) -> float:
    """The share of all elements that this rank holds between two steps."""
    held = total = 0
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            held += parameter.to_local().numel()
        else:
            held += parameter.numel()  # 0 under ZeRO-3, whose shard is elsewhere
        total += getattr(parameter, "ds_numel", parameter.numel())
    return held / total
