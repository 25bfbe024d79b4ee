"""Checkpoints: which ones are whole, and the state that transformers does not save.

A checkpoint is whole once `trl_dro_complete.json` is in it, which is written last and lists the files that a run goes
on from, with their sizes. A run that dies while it writes leaves none, and what was copied or deleted in part does not
match the list.

Everything written here is JSON and safetensors; nothing is pickled.
"""

import json
import os
import re
import time
import uuid
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from . import __version__


MARKER = "trl_dro_complete.json"
_STATE = "trl_dro_state"
_BINARY = {".safetensors", ".bin", ".pt", ".pth", ".distcp"}
# Small files that a run goes on from too: states, indices of weights in several files, and what names the shards.
_SMALL = re.compile(
    rf"{_STATE}_.*|{re.escape(TRAINER_STATE_NAME)}|entropy_ctrl_state\.json|.*\.index\.json|latest|\.metadata"
)
_CHECKPOINT = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")


def _files(directory: Path) -> dict[str, int]:
    """Sizes in bytes of the files that a run goes on from, by path relative to the checkpoint.

    Others, such as a README or the model's configuration, may be edited later.
    """
    return {
        path.relative_to(directory).as_posix(): path.stat().st_size
        for path in sorted(directory.rglob("*"))
        if path.is_file() and (path.suffix in _BINARY or _SMALL.fullmatch(path.name))
    }


def mark_incomplete(directory: str | Path) -> None:
    """Take the marker off a checkpoint that is about to be written again."""
    Path(directory, MARKER).unlink(missing_ok=True)


def mark_complete(directory: str | Path, *, exact: bool, setup: dict[str, Any]) -> None:
    """Close a checkpoint after all ranks have written their files.

    Args:
        directory: the checkpoint.
        exact: whether a run can go on from it exactly; False where only the model was saved.
        setup: settings that must be the same when the run goes on.
    """
    directory = Path(directory)
    files = _files(directory)
    content = {"version": __version__, "written": time.time(), "exact": exact, "setup": setup, "files": files}
    for name in files:  # a machine that dies could otherwise keep the marker and lose what it lists
        with (directory / name).open("rb") as file:
            os.fsync(file.fileno())
    # Renamed into place: the marker is there whole or not at all. Ranks that share a disk may each write it.
    written = directory / f"{MARKER}.{uuid.uuid4().hex}"
    with written.open("w") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    written.replace(directory / MARKER)


def what_is_missing(directory: str | Path) -> str | None:
    """Why a checkpoint is not whole, None if it is."""
    directory = Path(directory)
    try:
        listed = read_marker(directory)["files"]
    except FileNotFoundError:
        return f"{MARKER} is missing, so it was not written to the end"
    except (ValueError, KeyError, TypeError):
        return f"{MARKER} cannot be read"
    present = _files(directory)
    for name, size in listed.items():
        if name not in present:
            return f"{name} is missing"
        if present[name] != size:
            return f"{name} has {present[name]} of {size} bytes"
    return None


def read_marker(directory: str | Path) -> dict[str, Any]:
    """What [`mark_complete`] noted: `version`, `written` (seconds since 1970), `exact`, `setup`, `files`."""
    return json.loads(Path(directory, MARKER).read_text())


def checkpoints_in(output_dir: str | Path) -> list[Path]:
    """The checkpoints of a run, whole or not, the one written last first.

    Not the one of most steps: a run may have begun anew, or gone on from an earlier one, where others are left over.
    """
    found = [path for path in Path(output_dir).glob("*") if _CHECKPOINT.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=_written, reverse=True)


def _written(directory: Path) -> tuple[float, int]:
    """When a checkpoint was written, and its step."""
    try:
        written = float(read_marker(directory)["written"])
    except (OSError, ValueError, KeyError, TypeError):
        written = directory.stat().st_mtime  # torn, or of an older version
    return written, int(directory.name.rsplit("-", 1)[1])


def newest_complete(output_dir: str | Path) -> tuple[str | None, dict[str, str]]:
    """The newest whole checkpoint.

    Returns:
        Its path, None without one; and what is missing from each newer one, by path.
    """
    torn: dict[str, str] = {}
    for path in checkpoints_in(output_dir):
        missing = what_is_missing(path)
        if missing is None:
            return str(path), torn
        torn[str(path)] = missing
    return None, torn


# State of one process


def _state_files(directory: str | Path, rank: int) -> tuple[Path, Path]:
    return Path(directory, f"{_STATE}_{rank}.json"), Path(directory, f"{_STATE}_{rank}.safetensors")


def save_state(directory: str | Path, rank: int, state: dict[str, Any]) -> None:
    """Write the state of one process.

    Args:
        directory: the checkpoint.
        rank: index of the process.
        state: dicts, lists, tuples, tensors, numbers, texts and None, nested.

    Raises:
        TypeError: something else is in the state.
    """
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_encode(state, tensors))
    json_file, tensor_file = _state_files(directory, rank)
    json_file.write_text(text)
    save_file(tensors, tensor_file)


def load_state(directory: str | Path, rank: int, device: torch.device | str = "cpu") -> dict[str, Any]:
    """What [`save_state`] wrote, tensors on `device`."""
    json_file, tensor_file = _state_files(directory, rank)
    tensors = {key: tensor.to(device) for key, tensor in load_file(tensor_file).items()}
    return _decode(json.loads(json_file.read_text()), tensors)


def _encode(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        key = str(len(tensors))
        # Copied: micro-batches are views of one batch, which safetensors refuses to write twice.
        tensors[key] = value.detach().to("cpu", copy=True).contiguous()
        return {"tensor": key}
    if isinstance(value, dict):
        return {"dict": [[_encode(key, tensors), _encode(item, tensors)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_encode(item, tensors) for item in value]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{type(value).__name__} in the state of a checkpoint: only tensors, numbers and texts are saved.")


def _decode(value: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {_decode(key, tensors): _decode(item, tensors) for key, item in content}
    items = [_decode(item, tensors) for item in content]
    return items if kind == "list" else tuple(items)
