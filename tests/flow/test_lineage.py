"""The chain behind a real run's numbers, and one of its steps computed again."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.flow.conftest import ROOT, FlowRun, environment

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="session")
def folder(flow_run: FlowRun) -> Path:
    assert flow_run.code == 0, flow_run.output[-4000:]
    return Path(flow_run.data.paths.run)


def grpo_run(folder: Path, *arguments: str) -> tuple[int, Any]:
    """Exit code and JSON of `grpo run …`."""
    done = subprocess.run(
        [sys.executable, "-m", "grpo_lib.cli", "run", *arguments, "--json"],
        cwd=ROOT,
        env=environment(folder),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


def test_every_link_of_the_chain_holds(folder: Path) -> None:
    code, links = grpo_run(folder, "explain", str(folder))
    assert code == 0, links
    checked = {link["what"] for link in links if link["state"] == "checked"}
    assert checked >= {"rollouts", "metrics", "weights", "base model", "data"}


def test_a_step_is_computed_again_to_the_last_bit(folder: Path, tmp_path: Path) -> None:
    """Every metric and all weights; a record that was touched up is found out, without a second start."""
    forged = tmp_path / "runs" / folder.parent.name / folder.name
    shutil.copytree(folder, forged)
    shutil.copytree(folder.parents[1] / "store", tmp_path / "runs" / "store")
    lines = (forged / "metrics.jsonl").read_text().splitlines()
    second = json.loads(lines[1])
    second["optim/grad_norm"] *= 1 + 1e-7
    lines[1] = json.dumps(second)
    (forged / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    code, replayed = grpo_run(tmp_path, "replay-step", str(forged), "2")
    assert code == 1
    apart = [metric["name"] for metric in replayed["metrics"] if metric["recorded"] != metric["replayed"]]
    assert apart == ["optim/grad_norm"]
    assert replayed["weights_equal"], "the certificate of that version holds the same checksum"
    assert len(replayed["metrics"]) > 10
