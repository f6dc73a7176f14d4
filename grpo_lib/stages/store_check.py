"""Whether a run's store can be reached and written, as one more line of the preflight."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_lib.config import RunConfig
from grpo_lib.errors import StorageError
from grpo_lib.preflight import PreflightCheck
from grpo_lib.stages.run_paths import store_location
from grpo_lib.storage.locations import is_remote, open_store


def store_check(config: RunConfig, *, pool: Mapping[str, Any] | None = None, by_store: bool = True) -> PreflightCheck:
    """A service is tried: something small is written, read and removed.

    Args:
        pool: The profile's pool, if steps run on machines of their own.
        by_store: A remote store takes the place of a disk that these machines share.
    """
    location = store_location(config)
    handed_on = by_store and is_remote(location)
    if pool is not None and not handed_on and not pool.get("persistent_volume_claims"):
        instead = "set storage.store=s3://bucket/prefix, or " if by_store else ""
        detail = (
            f"steps run on machines of their own, and storage.root ({config.storage.root}) would be another folder on "
            f"each: {instead}mount one for all by persistent_volume_claims in the profile's pools"
        )
        return PreflightCheck(name="store", ok=False, detail=detail)
    if not is_remote(location):
        folder = next(path for path in (Path(location), *Path(location).parents) if path.exists())
        if folder.is_dir() and os.access(folder, os.W_OK):
            return PreflightCheck(name="store", ok=True, detail=f"{location}, a folder")
        detail = f"{folder} is not a writable folder; set storage.store, or leave it null"
        return PreflightCheck(name="store", ok=False, detail=detail)
    try:
        open_store(location).check_writable()
    except StorageError as error:
        return PreflightCheck(name="store", ok=False, detail=str(error))
    return PreflightCheck(name="store", ok=True, detail=f"{location} can be written and read")
