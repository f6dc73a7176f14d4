"""The chain from a number to its origin: whole for an honest run, broken at the link that was tampered with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_lib.cli import main
from grpo_lib.errors import DataError
from grpo_lib.stages import explain
from grpo_lib.stages.explain import LinkState
from grpo_lib.stages.stored_run import StoredRun, open_run
from tests.unit.stored_runs import finished_run
from tests.unit.test_stages_run_diff import rewrite


def broken(stored: StoredRun, step: int | None = None) -> dict[str, str]:
    return {link.what: link.text for link in explain.run(stored, step) if link.state is LinkState.BROKEN}


def test_an_honest_run(tmp_path: Path) -> None:
    stored = finished_run(tmp_path, "GRPOFlow/1")
    links = {link.what: link for link in explain.run(stored)}
    assert list(links) == [
        "step", "rollouts", "metrics", "weights", "state before", "base model", "data", "code", "packages", "machine",
        "switches", "settings",
    ]  # fmt: skip
    assert not broken(stored)
    checked = {what for what, link in links.items() if link.state is LinkState.CHECKED}
    assert checked == {"rollouts", "metrics", "weights", "base model", "data"}
    assert dict(stored.rollout_refs())[2].key in links["rollouts"].text
    assert "reward/mean 0.5000" in links["metrics"].text
    assert "version 1" in links["weights"].text, "step 2 was sampled by version 1"
    assert f"sha256 {stored.dataset_sha256()}" in links["data"].text
    assert "torch " in links["packages"].text


def edited_reward(stored: StoredRun) -> None:
    rewrite(stored.paths.metrics, 1, {"reward/mean": 0.9})


def flipped_rollout(stored: StoredRun) -> None:
    artifact = stored.store().get(dict(stored.rollout_refs())[1])
    artifact.chmod(0o644)
    data = bytearray(artifact.read_bytes())
    data[len(data) // 2] ^= 1
    artifact.write_bytes(bytes(data))


def lost_rollout(stored: StoredRun) -> None:
    stored.store().get(dict(stored.rollout_refs())[1]).unlink()


def failed_sync(stored: StoredRun) -> None:
    rewrite(stored.paths.certificates, 1, {"mismatched": ["model.norm.weight"]})


def other_sync(stored: StoredRun) -> None:
    rewrite(stored.paths.certificates, 1, {"policy_version": 7})


def other_data(stored: StoredRun) -> None:
    shard = next(stored.paths.data.rglob("*.parquet"))
    shard.chmod(0o644)
    shard.write_bytes(shard.read_bytes() + b"x")


def other_model(stored: StoredRun) -> None:
    text = stored.paths.record.read_text()
    stored.paths.record.write_text(text.replace(str(stored.lineage["model_sha256"]), "ab" * 32))


@pytest.mark.parametrize(
    ("tamper", "link", "message"),
    [
        (edited_reward, "metrics", "reward/mean is recorded as 0.9 and computes to 0.5"),
        (flipped_rollout, "rollouts", "was damaged after storing"),
        (lost_rollout, "rollouts", "is not in the store"),
        (failed_sync, "weights", "NOT certified"),
        (other_sync, "weights", "no certificate of policy version 0"),
        (other_model, "base model", f"and had {'ab' * 32} when the run began"),
        (other_data, "data", "parquet"),
    ],
)
def test_a_tampered_link_is_broken_and_the_others_hold(
    tmp_path: Path, tamper: Callable[[StoredRun], None], link: str, message: str
) -> None:
    stored = finished_run(tmp_path, "GRPOFlow/1")
    tamper(stored)
    found = broken(open_run(str(stored.paths.run)), 1)
    assert list(found) == [link]
    assert message in found[link]


def test_a_step_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no step 9; it has 1 to 2"):
        explain.run(finished_run(tmp_path, "GRPOFlow/1"), 9)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored = finished_run(tmp_path, "GRPOFlow/1")
    assert main(["run", "explain", str(stored.paths.run), "1"]) == 0
    assert "reward/mean 0.5000" in capsys.readouterr().out
    edited_reward(stored)
    assert main(["run", "explain", str(stored.paths.run), "1"]) == 1
    assert "BROKEN   reward/mean is recorded as 0.9" in capsys.readouterr().out
