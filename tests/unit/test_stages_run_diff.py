"""Two stored runs: what differs is said, what is equal is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_lib.cli import main
from grpo_lib.errors import StorageError
from grpo_lib.stages import run_diff
from grpo_lib.stages.run_diff import Difference
from grpo_lib.stages.stored_run import StoredRun
from tests.unit.stored_runs import finished_run


def said(a: StoredRun, b: StoredRun, *, but: str = "storage.root") -> list[Difference]:
    return [difference for difference in run_diff.run(a, b) if difference.what != but]


def test_a_repetition_differs_in_nothing(tmp_path: Path) -> None:
    a, b = finished_run(tmp_path, "GRPOFlow/1"), finished_run(tmp_path, "GRPOFlow/2")
    rewrite(b.paths.metrics, 2, {"time/step_s": 9.0, "throughput/train_tokens_per_s": 1e4})
    assert run_diff.run(a, b) == ()


def test_settings_and_what_follows_from_them(tmp_path: Path) -> None:
    a = finished_run(tmp_path, "GRPOFlow/1")
    b = finished_run(tmp_path, "GRPOFlow/2", overrides=["seed=2", "trainer.learning_rate=0.5"])
    assert [(d.section, d.what) for d in said(a, b)] == [
        ("settings", "seed"),
        ("settings", "trainer.learning_rate"),
        ("origin", "seeds.run"),
        *[(d.section, d.what) for d in said(a, b) if d.section == "data"],
    ]


def test_the_first_step_apart(tmp_path: Path) -> None:
    """Only the second step's rewards differ: rollouts and metrics part there, not before."""
    a = finished_run(tmp_path, "GRPOFlow/1", rewards=[(1.0, 0.0), (1.0, 0.0), (0.0, 1.0)])
    b = finished_run(tmp_path, "GRPOFlow/2", rewards=[(1.0, 0.0), (0.0, 0.5), (1.0, 0.0)])
    found = {d.section: d for d in said(a, b) if d.section == "rollouts"}
    assert found["rollouts"].what == "content of step 2, the first of 2"
    rewards = [d for d in said(a, b) if d.what.startswith("reward/mean")]
    assert rewards == [Difference(section="metrics", what="reward/mean, from step 2 on", a="0.5", b="0.25")]


def test_weights_that_part(tmp_path: Path) -> None:
    a, b = finished_run(tmp_path, "GRPOFlow/1"), finished_run(tmp_path, "GRPOFlow/2")
    rewrite(b.paths.certificates, 3, {"checksum": "ff"})
    assert said(a, b) == [Difference(section="weights", what="checksum of version 2, the first of 1", a="00", b="ff")]


def test_a_shorter_run(tmp_path: Path) -> None:
    a = finished_run(tmp_path, "GRPOFlow/1", rewards=[(1.0, 0.0)] * 3)
    b = finished_run(tmp_path, "GRPOFlow/2", rewards=[(1.0, 0.0)] * 2)
    b.paths.evaluation.unlink()
    texts = {(d.section, d.what): (d.a, d.b) for d in said(a, b)}
    assert texts["settings", "loop.steps"] == ("3", "2")
    assert texts["rollouts", "stored"] == ("3 from 1 to 3", "2 from 1 to 2")
    assert texts["metrics", "steps"] == ("3 from 1 to 3", "2 from 1 to 2")
    assert texts["evaluation", "after.accuracy"] == ("0.5", "–")


def test_a_damaged_artifact_is_no_difference_but_an_error(tmp_path: Path) -> None:
    a, b = finished_run(tmp_path, "GRPOFlow/1"), finished_run(tmp_path / "b", "GRPOFlow/2")
    artifact = b.store().get(dict(b.rollout_refs())[1])
    artifact.chmod(0o644)
    artifact.write_bytes(artifact.read_bytes()[:-1] + b"x")
    with pytest.raises(StorageError, match="was damaged after storing"):
        run_diff.run(a, b)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (
        finished_run(tmp_path, "GRPOFlow/1"),
        finished_run(tmp_path, "GRPOFlow/2", overrides=["trainer.weight_decay=0.5"]),
    )
    assert main(["run", "diff", str(a.paths.run), str(a.paths.run)]) == 0
    assert capsys.readouterr().out == ""
    assert main(["run", "diff", str(a.paths.run), str(b.paths.run)]) == 1
    assert "settings:\n  trainer.weight_decay\n" in capsys.readouterr().out
    assert main(["run", "diff", str(a.paths.run), str(b.paths.run), "--json"]) == 1
    assert [d["what"] for d in json.loads(capsys.readouterr().out)] == ["trainer.weight_decay"]
    assert main(["run", "diff", str(a.paths.run), str(tmp_path)]) == 2


def rewrite(path: Path, line: int, changes: dict[str, object]) -> None:
    """Change fields of one line, counted from 1, of a file of JSON lines."""
    lines = path.read_text().splitlines()
    lines[line - 1] = json.dumps(json.loads(lines[line - 1]) | changes)
    path.write_text("\n".join(lines) + "\n")
