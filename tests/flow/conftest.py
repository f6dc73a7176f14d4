"""One run of the flow, shared by all assertions about it."""

# pyright: reportPrivateImportUsage=false
# (metaflow declares no exports)

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import metaflow
import pytest

ROOT = Path(__file__).resolve().parents[2]
STEPS = 40
USER = "tester"
_FLOWS = {"grpo_flow": "GRPOFlow", "parity_flow": "ParityFlow"}


@dataclass(frozen=True, kw_only=True)
class FlowRun:
    """A finished run: its output and, through Metaflow's client, its artifacts."""

    flow: str  # e.g. "GRPOFlow"
    code: int
    output: str
    folder: Path  # datastore and run directories

    @property
    def run(self) -> Any:
        metaflow.namespace(None)
        metaflow.metadata(f"local@{self.folder}")
        found = re.search(r"run-id (\d+)", self.output)
        assert found, self.output
        return metaflow.Run(f"{self.flow}/{found[1]}")

    @property
    def data(self) -> Any:
        """All artifacts of the run's last step that has them."""
        return self.run.data


def environment(folder: Path) -> dict[str, str]:
    """Of a flow process: its own datastore, no network."""
    return {
        **os.environ,
        "METAFLOW_USER": USER,
        "METAFLOW_DATASTORE_SYSROOT_LOCAL": str(folder),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }


def flow_command(
    folder: Path,
    *arguments: str,
    flow: str = "grpo_flow",
    variables: Mapping[str, str] | None = None,
    timeout_s: float = 120,
) -> subprocess.CompletedProcess[str]:
    """`python flows/<flow>.py …` with the datastore of `folder`."""
    return subprocess.run(
        [sys.executable, f"flows/{flow}.py", *arguments],
        cwd=ROOT,
        env=environment(folder) | dict(variables or {}),
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )


def run_flow(
    folder: Path, *arguments: str, flow: str = "grpo_flow", overrides: Sequence[str] = (), timeout_s: float = 500
) -> FlowRun:
    """`python flows/<flow>.py run …` with its files under `folder`."""
    command = [sys.executable, f"flows/{flow}.py", "run", *arguments]
    for override in (f"storage.root={folder / 'runs'}", *overrides):
        command += ["--set", override]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return FlowRun(flow=_FLOWS[flow], code=done.returncode, output=done.stdout, folder=folder)


@pytest.fixture(scope="session")
def flow_run(tmp_path_factory: pytest.TempPathFactory) -> FlowRun:
    """A short run with every part in it."""
    return run_flow(
        tmp_path_factory.mktemp("flow"),
        "--trainer",
        "olmo_core",
        overrides=(f"loop.steps={STEPS}", "loop.checkpoint_every=20", "tracking.wandb=true"),
    )
