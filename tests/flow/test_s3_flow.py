"""The main job with everything on S3, on machines without a shared disk, killed while it trains and resumed."""

# pyright: reportPrivateImportUsage=false
# (metaflow declares no exports)

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from grpo_lib.cli import main
from grpo_lib.storage.locations import open_store
from grpo_lib.storage.refs import ArtifactStore
from tests.flow.conftest import ROOT, environment
from tests.s3_service import aws_environment, s3_service

pytestmark = [pytest.mark.timeout(1300), pytest.mark.slow]

STEPS, EVERY = 6, 2
STORE = "s3://bucket/artifacts"
SMALL = (
    f"loop.steps={STEPS}", f"loop.checkpoint_every={EVERY}", "loop.prompts_per_step=4", "rollout.group_size=8",
    "data.num_train=40", "data.num_heldout=10", "evaluation.samples_per_prompt=8", "weight_sync.canary_every=2",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Cloud:
    """A service, and a folder for what a machine has of its own."""

    variables: dict[str, str]
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return environment(self.folder) | self.variables

    @property
    def machine(self) -> Path:
        """`storage.root` of whichever machine runs a step."""
        return self.folder / "machine"

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "flows/grpo_flow.py", "--datastore", "s3", *arguments]

    def started(self, output: Path, *arguments: str) -> subprocess.Popen[bytes]:
        """`run` or `resume` with its output in a file, every step on a machine of its own."""
        with output.open("wb") as file:
            return subprocess.Popen(
                [*self.command(*arguments), "--with", "tests.flow.lost_disk.loses_its_disk"],
                cwd=ROOT,
                env=self.environment | {"PYTHONPATH": str(ROOT)},
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def processes(self) -> list[psutil.Process]:
        """All that belong to the run: they have its environment, and nobody else does."""
        mark = str(self.folder)
        found = psutil.process_iter(["environ"])
        return [p for p in found if (p.info["environ"] or {}).get("METAFLOW_DATASTORE_SYSROOT_LOCAL") == mark]

    def pull_the_plug(self) -> None:
        """The machine is gone: its processes at once, and its disk."""
        while alive := [p for p in self.processes() if p.status() != psutil.STATUS_ZOMBIE]:
            for process in alive:
                try:
                    process.send_signal(signal.SIGKILL)
                except psutil.NoSuchProcess:
                    continue
            time.sleep(0.2)
        for folder in (self.machine, Path(self.variables["XDG_CACHE_HOME"])):
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    folder = tmp_path_factory.mktemp("s3flow")
    with s3_service() as endpoint, pytest.MonkeyPatch.context() as patch:
        variables = aws_environment(endpoint) | {
            "XDG_CACHE_HOME": str(folder / "cache"),
            "METAFLOW_S3_ENDPOINT_URL": endpoint,
            "METAFLOW_DATASTORE_SYSROOT_S3": "s3://bucket/metaflow",
            "METAFLOW_DEFAULT_METADATA": "local",
        }
        for name, value in variables.items():
            patch.setenv(name, value)
        from grpo_lib.storage.s3_client import s3_client

        s3_client().create_bucket(Bucket="bucket")
        yield Cloud(variables=variables, folder=folder)


@pytest.fixture(scope="module")
def store(cloud: Cloud) -> ArtifactStore:
    return open_store(STORE)


@dataclass(frozen=True, kw_only=True)
class Killed:
    """A run that lost its machine after a checkpoint."""

    run_id: str
    published: list[str]  # documents of the run at that time


def documents(store: ArtifactStore, run_id: str) -> list[str]:
    prefix = f"runs/GRPOFlow/{run_id}/published/"
    return [document.name.removeprefix(prefix).removesuffix(".json") for document in store.documents(prefix)]


def run_id_in(output: Path) -> str | None:
    found = re.search(r"run-id (\d+)", output.read_text())
    return None if found is None else found[1]


@pytest.fixture(scope="module")
def killed(cloud: Cloud, store: ArtifactStore) -> Killed:
    overrides = [f"storage.root={cloud.machine}", f"storage.store={STORE}", *SMALL]
    output = cloud.folder / "run.txt"
    process = cloud.started(output, "run", *(part for one in overrides for part in ("--set", one)))
    deadline = time.monotonic() + 600
    while True:
        assert process.poll() is None, output.read_text()[-4000:]
        assert time.monotonic() < deadline, output.read_text()[-4000:]
        run_id = run_id_in(output)
        if run_id and any(name.startswith("checkpoints/") for name in documents(store, run_id)):
            break
        time.sleep(0.1)
    cloud.pull_the_plug()
    process.wait()
    return Killed(run_id=run_id, published=documents(store, run_id))


@pytest.fixture(scope="module")
def resumed(cloud: Cloud, killed: Killed) -> str:
    """Output of the resumed run."""
    output = cloud.folder / "resume.txt"
    process = cloud.started(output, "resume", "fit", "--origin-run-id", killed.run_id)
    assert process.wait(timeout=600) == 0, output.read_text()[-6000:]
    return output.read_text()


def test_the_killed_run_left_whole_things_only(cloud: Cloud, killed: Killed, capsys: Any) -> None:
    assert {"data", "shards", "run.json", "metrics.jsonl", "rollouts.jsonl"} <= set(killed.published)
    assert "model" not in killed.published, "killed before it was done"
    assert main(["store", "verify", "--store", STORE]) == 0
    assert ", 0 damaged or missing; 1 runs refer to" in capsys.readouterr().out


def test_it_goes_on_from_the_published_checkpoint_and_ends(
    cloud: Cloud, store: ArtifactStore, killed: Killed, resumed: str, tmp_path: Path, capsys: Any
) -> None:
    run_id = re.search(r"run-id (\d+)", resumed)
    assert run_id
    assert main(["store", "get", "--store", STORE, f"GRPOFlow/{run_id[1]}", str(tmp_path / "run")]) == 0
    run = tmp_path / "run"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["policy_version"] for row in rows] == list(range(1, STEPS + 1))
    assert f"step {EVERY + 1}/{STEPS}" in resumed
    assert f"step {EVERY}/{STEPS}" not in resumed, "what the checkpoint has is not done again"
    assert (run / "model" / "config.json").is_file()
    assert json.loads((run / "parity.json").read_text())["verdict"] != "FAIL"
    capsys.readouterr()
    assert main(["run", "explain", str(run), str(STEPS)]) == 0, capsys.readouterr().out
    assert main(["store", "verify", "--store", STORE]) == 0


def test_a_run_named_by_its_id_says_where_its_files_are(cloud: Cloud, killed: Killed) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "grpo_lib.cli", "run", "explain", f"GRPOFlow/{killed.run_id}"],
        cwd=ROOT,
        env=cloud.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert f"grpo store get --store {STORE} GRPOFlow/{killed.run_id} FOLDER" in done.stderr


def test_nothing_is_garbage_and_nothing_was_left_running(cloud: Cloud, resumed: str, capsys: Any) -> None:
    assert main(["store", "gc", "--store", STORE, "--grace-hours", "1"]) == 0
    assert "garbage       0 artifacts" in capsys.readouterr().out
    assert cloud.processes() == []
    assert not os.path.exists(cloud.machine)
