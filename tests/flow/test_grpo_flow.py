"""The main job, end to end on the real parts: one run, many questions."""

# pyright: reportPrivateImportUsage=false
# (metaflow declares no exports)

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_lib.data.models import resolve_model_path
from grpo_lib.stages.recorder import read_certificates
from grpo_lib.storage.refs import StoreRef
from grpo_lib.storage.rollouts import read_rollouts
from grpo_lib.timing import SPANS
from grpo_lib.types import FinishReason
from tests.flow.conftest import ROOT, STEPS, FlowRun, environment, run_flow

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="session")
def data(flow_run: FlowRun) -> Any:
    assert flow_run.code == 0, flow_run.output[-4000:]
    return flow_run.data


@pytest.fixture(scope="session")
def rows(data: Any) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in Path(data.training.metrics).read_text().splitlines()]
    assert len(rows) == STEPS, "questions about every row need rows"
    return rows


def test_it_ends_with_the_verdict_and_the_way_to_the_card(flow_run: FlowRun, data: Any) -> None:
    assert f"PASS: {len(data.parity['checks'])} PASS, 0 FAIL, 0 INCONCLUSIVE" in flow_run.output
    assert f"card view {flow_run.run.id}/parity_report --id report" in flow_run.output


def test_the_documented_way_to_read_a_run_works(flow_run: FlowRun, data: Any) -> None:
    program = (
        "from metaflow import Flow, namespace; namespace(None); d = Flow('GRPOFlow').latest_run.data; "
        "print(d.parity['verdict'], d.evaluation)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=environment(flow_run.folder),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("PASS {'before': ")


def test_it_learns(data: Any) -> None:
    gain = data.evaluation["gain"]["sampled_pass_at_1"]
    assert gain["low"] > 0.1, "the whole interval, after a quarter of the recipe's steps"
    assert 0.4 < data.evaluation["before"]["sampled_pass_at_1"]["value"] < 0.6


def test_every_step_left_its_artifacts(flow_run: FlowRun, data: Any) -> None:
    assert data.config.recipe == "embedded_addition"
    assert len(data.config_hash) == 64
    assert data.lineage["packages"]["ray"]
    if shutil.which("git"):
        git = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, check=False)
        assert (data.lineage["git"] is not None) == (git.returncode == 0), "None outside a checkout"
    assert data.lineage["seeds"] == {"run": 1, "engine": 0}
    assert data.data.manifest.splits["train"].num_prompts == 800
    assert data.data.manifest.splits["heldout"].num_prompts == 150
    assert data.data.packing.pack_length == data.config.trainer.pack_length
    assert data.shard_plan.mismatched == ()
    assert data.certificate.ok
    assert [step.id for step in flow_run.run][::-1] == [
        "start", "prepare_data", "shard_model", "sync_weights", "fit", "evaluate", "parity_report", "end",
    ]  # fmt: skip


def test_sharding_kept_every_bit_and_the_tie(data: Any) -> None:
    plan = data.shard_plan
    names = {tensor.hf_name for tensor in plan.tensors}
    assert {"model.embed_tokens.weight", "model.norm.weight"} <= names, "root-level parameters too"
    assert "lm_head.weight" not in names, "a tied head is the embedding"
    assert plan.tied_embeddings
    assert all(sum(t.local_numel) == math.prod(t.shape) for t in plan.tensors)
    assert all(min(t.local_numel) > 0 for t in plan.tensors if math.prod(t.shape) >= 64), "both ranks hold a share"


def test_the_first_sync_is_certified_with_a_canary(data: Any) -> None:
    certificate = data.certificate
    assert certificate.policy_version == 0
    assert certificate.engine_versions == (0,)
    assert certificate.num_tensors == len(data.shard_plan.tensors)
    assert certificate.canary is not None
    assert certificate.canary.num_tokens > 0


def test_every_version_was_pushed_and_certified(data: Any) -> None:
    certificates = read_certificates(Path(data.training.certificates))
    assert [c.policy_version for c in certificates] == list(range(STEPS + 1))
    assert all(c.ok for c in certificates)
    assert len({c.checksum for c in certificates}) == STEPS + 1, "weights moved at every step"
    every = data.config.weight_sync.canary_every
    assert [i for i, c in enumerate(certificates) if c.canary is not None] == list(range(0, STEPS + 1, every))


def test_metrics_stand_in_both_formats(data: Any, rows: list[dict[str, Any]]) -> None:
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["policy_version"] for row in rows] == list(range(1, STEPS + 1))
    table = pq.read_table(Path(data.training.metrics).with_suffix(".parquet"))
    assert table.num_rows == STEPS
    assert table["reward/mean"].to_pylist() == [row["reward/mean"] for row in rows]


def test_the_optimiser_stepped_once_per_step_at_the_configured_rate(data: Any, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert row["optim/applied"] == 1.0
        assert row["optim/weights_moved"] == 1.0
        assert row["optim/lr"] == pytest.approx(data.config.trainer.learning_rate, rel=1e-12)
        assert row["optim/update_rms"] > 0


def test_times_add_up(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        claimed = sum(row[f"time/{span}_s"] for span in SPANS)
        assert claimed + row["time/other_s"] == pytest.approx(row["time/step_s"], abs=1e-9)
    total = sum(row["time/step_s"] for row in rows)
    assert sum(row["time/other_s"] for row in rows) < 0.02 * total


def test_rollouts_are_on_policy_and_seeds_distinct(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert row["staleness/max"] == 0
        assert row["sampling/seed_collisions"] == 0
        assert row["mismatch/nan_count"] == 0
        assert row["mismatch/tis_clip_count"] == 0
        assert row["mismatch/abs_max"] < 5e-5


def test_stored_rollouts_are_what_was_trained_on(data: Any, rows: list[dict[str, Any]]) -> None:
    index = [json.loads(line) for line in Path(data.training.rollout_index).read_text().splitlines()]
    assert [entry["step"] for entry in index] == list(range(1, STEPS + 1))
    store = data.paths.open_store()
    entry = dict(index[6])
    entry.pop("step")
    stored = read_rollouts(store, StoreRef.from_dict(entry))
    rollouts = [rollout for group in stored.groups for rollout in group.rollouts]
    assert len(rollouts) == 256
    mean = sum(rollout.verdict.reward for rollout in rollouts) / len(rollouts)
    assert mean == pytest.approx(rows[6]["reward/mean"])
    assert {span.version for r in rollouts for span in r.completion.version_spans} == {6}
    assert all(r.completion.token_ids[-1] == 1 for r in rollouts if r.completion.finish_reason is FinishReason.STOP)


def test_checkpoints_are_complete_and_pruned(data: Any) -> None:
    names = [Path(path).name for path in data.training.checkpoints]
    assert names == ["step-000020", "step-000040"]
    state = json.loads((Path(data.training.checkpoints[-1]) / "loop.json").read_text())
    assert state["steps_done"] == state["policy_version"] == STEPS
    assert state["prompts"]["position"] == STEPS * data.config.loop.prompts_per_step
    assert not list(Path(data.paths.checkpoints).glob(".partial-*"))


def test_the_export_loads_elsewhere(data: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(data.training.export, dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(resolve_model_path("builtin:tiny_qwen3"), dtype=torch.float32)
    weights, before = model.state_dict(), base.state_dict()
    assert weights["lm_head.weight"].data_ptr() == weights["model.embed_tokens.weight"].data_ptr()
    assert not torch.equal(weights["model.norm.weight"], before["model.norm.weight"])
    assert AutoTokenizer.from_pretrained(data.training.export).chat_template


def test_parity_is_as_tight_as_physics_allows(data: Any) -> None:
    checks = {check["name"]: check for check in data.parity["checks"]}
    assert checks["hf vs olmo_core: max |dlogprob|"]["value"] <= 1e-5
    assert checks["engine decode vs engine score: max |dlogprob|"]["value"] == 0
    assert checks["engine decode vs engine score: max |dlogprob|"]["num_observations"] >= 20_000
    assert {check["verdict"] for check in data.parity["checks"]} == {"PASS"}


def test_plain_artifacts_are_json(data: Any) -> None:
    assert json.loads(json.dumps(data.parity)) == data.parity
    assert json.loads(json.dumps(data.evaluation)) == data.evaluation


def test_a_finished_run_is_compared_by_its_id_and_by_its_folder(flow_run: FlowRun, data: Any) -> None:
    """With itself: the same samples, no difference, and no verdict, for one seed proves nothing."""
    done = subprocess.run(
        [sys.executable, "-m", "grpo_lib.cli", "parity", "compare", flow_run.run.id, str(data.paths.run), "--json"],
        cwd=ROOT,
        env=environment(flow_run.folder),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    report = json.loads(done.stdout)
    verdicts = {check["name"]: check["verdict"] for check in report["checks"]}
    assert verdicts["same samples in the first step"] == verdicts["each run's own report"] == "PASS"
    assert "FAIL" not in verdicts.values()
    assert all(row["b_over_a"] in (1, None) for row in report["tables"]["time"])


def test_both_cards_exist_and_hold_their_parts(flow_run: FlowRun, data: Any) -> None:
    def card(step: str, card_id: str) -> str:
        target = flow_run.folder / f"{card_id}.html"
        done = subprocess.run(
            [sys.executable, "flows/grpo_flow.py", "card", "get", f"{flow_run.run.id}/{step}", target, "--id", card_id],
            cwd=ROOT,
            env=environment(flow_run.folder),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return target.read_text()

    assert {"start", "fit", "parity_report"} <= {step.id for step in flow_run.run}
    report, live = card("parity_report", "report"), card("fit", "live")
    assert data.parity["verdict"] == "PASS"
    assert len(report) > 100_000, "the viewer and the data"
    assert len(live) > 100_000


def test_wandb_wrote_its_offline_run(data: Any) -> None:
    assert list(Path(data.paths.tracking).rglob("*.wandb"))


def test_one_log_line_a_step_with_eta(flow_run: FlowRun, data: Any) -> None:
    lines = [line for line in flow_run.output.splitlines() if f"/{STEPS}  reward " in line]
    assert len(lines) == STEPS
    assert all("ETA" in line for line in lines)


def test_nothing_was_left_running(flow_run: FlowRun, data: Any) -> None:
    import psutil

    ours = [
        process.info["cmdline"]
        for process in psutil.process_iter(["cmdline", "environ"])
        # Ranks, engines, verifiers and Ray's daemons inherit the flow's environment, and nobody else has it.
        if (process.info["environ"] or {}).get("METAFLOW_DATASTORE_SYSROOT_LOCAL") == str(flow_run.folder)
    ]
    assert ours == []


@pytest.mark.parametrize(
    ("arguments", "overrides", "message"),
    [
        (("--recipe", "embeded_addition"), (), "did you mean embedded_addition"),
        (("--trainer", "hf_deepspeed"), ("trainer.num_ranks=64",), "64 ranks"),
        (("--trainer", "megatron"), (), "trainer.backend (megatron)"),
        ((), ("trainer.lerning_rate=1",), "did you mean trainer.learning_rate?"),
        ((), ("rollout.group_size=1",), "rollout.group_size (1)"),
        ((), ("rollout.temperature=0",), "rollout.temperature (0)"),
        ((), ("trainer.pack_length=20",), "trainer.pack_length (20)"),
        ((), ("trainer.num_ranks=64",), "64 ranks"),
        ((), ("model.path=/no/such/folder",), "/no/such/folder"),
    ],
)
def test_mistakes_end_in_start_with_a_message_and_no_traceback(
    tmp_path: Path, arguments: tuple[str, ...], overrides: tuple[str, ...], message: str
) -> None:
    failed = run_flow(tmp_path, *arguments, overrides=overrides, timeout_s=60)
    assert failed.code != 0
    assert message in failed.output
    assert "Traceback" not in failed.output
    assert "prepare_data/" not in failed.output, "nothing starts after a mistake"


def test_a_mistake_in_a_file_ends_in_prepare_data_with_the_same_courtesy(tmp_path: Path) -> None:
    for name, columns in (
        ("train", {"question": ["1+1="], "answer": ["2"]}),
        ("heldout", {"prompt": ["1+2="], "answer": ["3"]}),
    ):
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    files = [f"data.{name}_path={tmp_path / name}.parquet" for name in ("train", "heldout")]
    failed = run_flow(tmp_path, overrides=("data.source=parquet", *files), timeout_s=90)
    assert failed.code != 0
    assert "train.parquet: no column 'prompt'; columns present: 'question', 'answer'" in failed.output
    assert "Traceback" not in failed.output
    assert "shard_model/" not in failed.output, "no rank and no engine starts"
