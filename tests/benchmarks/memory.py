"""Memory that the state of training takes: `python tests/benchmarks/memory.py` prints docs/distributed.md's tables.

Arithmetic, not a measurement: bytes for each parameter, times parameters, over the GPUs that share them.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """Bytes for each parameter on a GPU: held by every GPU, shared between all, and in the memory of the host.

    Args:
        name: accelerate configuration.
        whole: on every GPU.
        shared: divided by the number of GPUs.
        host: of those that are shared, in the host's memory instead of the GPU's.
    """

    name: str
    whole: float
    shared: float
    host: float = 0.0

    def on_gpu(self, billions: float, gpus: int) -> float:
        """GB on each GPU."""
        return billions * (self.whole + (self.shared - self.host) / gpus)

    def on_host(self, billions: float) -> float:
        """GB on all machines together."""
        return billions * self.host


# float32 weights 4, gradients 4, two moments of Adam 8; the buckets of DDP hold the gradients again. DeepSpeed trains
# weights and gradients in bfloat16, 2 each, with a float32 copy of the weights beside the moments, 12.
SINGLE = Layout("single_gpu", whole=16, shared=0)
DDP = Layout("multi_gpu", whole=20, shared=0)
FSDP2 = Layout("fsdp2", whole=0, shared=16)
ZERO2 = Layout("zero2", whole=2, shared=14)
ZERO3 = Layout("zero3", whole=0, shared=16)
ZERO3_OFFLOAD = Layout("zero3_offload", whole=0, shared=16, host=14)
LAYOUTS = (SINGLE, DDP, ZERO2, FSDP2, ZERO3, ZERO3_OFFLOAD)
# A frozen base in bfloat16; the adapter's own state is some percent of it.
LORA = Layout("single_gpu, LoRA", whole=2, shared=0)
LORA_FSDP2 = Layout("fsdp2, LoRA", whole=0, shared=2)
QLORA = Layout("single_gpu, QLoRA (4 bits)", whole=0.5, shared=0)

GPUS = (1, 8, 64)
MODELS = {"0.6B": 0.6, "8B": 8.0, "32B": 32.0, "70B": 70.0}
# Of an 80 GB GPU; the rest is for activations, logits and generation.
ROOM = 40.0


def number(gigabytes: float) -> str:
    return f"{gigabytes:.2g}" if gigabytes < 10 else f"{gigabytes:.0f}"


def state_table() -> str:
    """GB on each GPU for each billion parameters."""
    rows = ["| configuration | 1 GPU | 8 GPUs | 64 GPUs | in host memory, altogether |", "|---|---|---|---|---|"]
    for layout in LAYOUTS:
        counts = [
            "" if (layout is SINGLE and gpus > 1) or (layout is DDP and gpus == 1) else number(layout.on_gpu(1, gpus))
            for gpus in GPUS
        ]
        rows.append(f"| `{layout.name}` | {' | '.join(counts)} | {number(layout.on_host(1)) if layout.host else ''} |")
    return "\n".join(rows)


def pick(billions: float, gpus: int) -> str:
    """The simplest configuration whose state leaves room on an 80 GB GPU."""
    full = (SINGLE,) if gpus == 1 else (DDP, FSDP2, ZERO3_OFFLOAD)
    adapters = (LORA, QLORA) if gpus == 1 else (LORA_FSDP2,)
    fitting = [layout for layout in full if layout.on_gpu(billions, gpus) <= ROOM]
    best = [layout for layout in fitting if not layout.host]
    shown = best[:1]
    if not best:  # an adapter is cheaper than the host's memory
        shown = [layout for layout in adapters if layout.on_gpu(billions, gpus) <= ROOM][:1] + fitting[:1]
    return " or ".join(f"{_quoted(layout.name)}: {number(layout.on_gpu(billions, gpus))} GB" for layout in shown)


def _quoted(name: str) -> str:
    configuration, comma, adapter = name.partition(",")
    return f"`{configuration}`{comma}{adapter}"


def pick_table() -> str:
    rows = ["| model | 1 GPU | 8 GPUs | 64 GPUs |", "|---|---|---|---|"]
    rows += [f"| {name} | {' | '.join(pick(billions, gpus) for gpus in GPUS)} |" for name, billions in MODELS.items()]
    return "\n".join(rows)


if __name__ == "__main__":
    print(state_table(), pick_table(), sep="\n\n")
