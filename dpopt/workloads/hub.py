"""The hub of Hugging Face without asking it: what of it is kept on this machine, and whether it would be asked."""

from __future__ import annotations

from pathlib import Path


def is_online() -> bool:
    """True if files that are not cached may be loaded from the hub: yes, unless HF_HUB_OFFLINE is set."""
    from huggingface_hub import constants

    return not constants.HF_HUB_OFFLINE


def kept_file(hub: str, name: str) -> Path | None:
    """The file `name` of the model `hub` where it was loaded before."""
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(hub, name)
    return Path(path) if isinstance(path, str) else None


def is_data_kept(hub: str) -> bool:
    """True if the data set `hub` was loaded before."""
    from datasets import config

    return any(Path(config.HF_DATASETS_CACHE).glob(hub.replace("/", "___")))
