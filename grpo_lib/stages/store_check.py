"""Whether a run's store can be reached and written, as one more line of the preflight."""

from __future__ import annotations

import os
from pathlib import Path

from grpo_lib.config import RunConfig
from grpo_lib.errors import StorageError
from grpo_lib.preflight import PreflightCheck
from grpo_lib.stages.run_paths import store_location
from grpo_lib.storage.locations import is_remote, open_store


def store_check(config: RunConfig) -> PreflightCheck:
    """A service is tried: something small is written, read and removed."""
    location = store_location(config)
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
