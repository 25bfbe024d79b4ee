"""Secrets stay in memory: what is written down, pickled or shown of a configuration holds none."""

import os
import re
from typing import Any


# In the names of settings whose texts are secrets: `hub_token`, `HF_TOKEN`, `api_key`, `aws_access_key_id`.
_SECRET_NAME = re.compile(
    r"token(?!i[sz])|key(?!word|board)|secret|passw|pwd|credential|authori[sz]ation|bearer|cookie"
    r"|(?<![a-z])o?auth(?![a-z])",
    re.IGNORECASE,
)
# Fields of configurations that are named like one.
_HARMLESS = {"include_num_input_tokens_seen", "bos_token", "eos_token", "pad_token", "unk_token"}
# Secrets by their form, wherever they stand: a token of the Hub, a user with a password in a URL.
_HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{8,}")
_USER_OF_URL = re.compile(r"(?<=://)[^/\s@]+@")


def is_secret_name(name: Any) -> bool:
    """Whether a text under this name is not to be written down."""
    return isinstance(name, str) and name not in _HARMLESS and _SECRET_NAME.search(name) is not None


def without_secrets(value: Any, name: Any = None) -> Any:
    """A copy in which every secret text is replaced by its name, as `<API_KEY>`.

    Args:
        value: texts, numbers and the like, nested in dicts, lists and tuples. Other objects are returned as they are.
        name: the name of `value`, which makes all texts in it secret if it is a secret's.
    """
    if isinstance(value, dict):
        return {key: without_secrets(item, name if is_secret_name(name) else key) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(without_secrets(item, name) for item in value)
    if type(value) is str:
        if is_secret_name(name):
            return f"<{name.upper()}>"
        return _USER_OF_URL.sub("", _HUB_TOKEN.sub("<TOKEN>", value))
    return value


def without_places(value: Any) -> Any:
    """A copy in which absolute paths, which name users and machines, are cut to their last component."""
    if isinstance(value, dict):
        return {key: without_places(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(without_places(item) for item in value)
    if type(value) is str and "\n" not in value and os.path.isabs(value):
        return os.path.basename(value.rstrip("/"))
    return value
