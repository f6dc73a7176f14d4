"""`--with tests.flow.lost_disk.loses_its_disk`: every step runs on a machine whose disk nobody else ever sees."""

# pyright: reportPrivateImportUsage=false
# (metaflow declares no exports)

from __future__ import annotations

import os
import shutil
from pathlib import Path

from metaflow import user_step_decorator


@user_step_decorator
def loses_its_disk(step_name, flow, inputs):
    """When the step has ended, its storage root and its cache of downloads are gone."""
    yield
    root = Path(flow.config.storage.root)
    assert root.is_dir() or step_name == "end", f"{step_name} left nothing in {root}: this proves nothing"
    for folder in (root, Path(os.environ["XDG_CACHE_HOME"])):
        shutil.rmtree(folder, ignore_errors=True)
