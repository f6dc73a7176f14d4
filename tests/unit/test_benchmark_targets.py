"""What the one command says about its targets: met, missed, or not measured, and never silent."""

from pathlib import Path

import gpu
import pytest

CASES = [
    {"name": "ours", "trainer": "olmo_core", "settings": {"compile": True}},
    {"name": "ours, recomputed", "trainer": "olmo_core", "settings": {"activation_checkpointing": True}},
    {"name": "other", "trainer": "hf_deepspeed", "settings": {}},
]


def pack(step_s: float) -> dict[str, float]:
    return {"documents": 10, "step_s": step_s, "mfu_forward_backward": 0.5, "peak_gb": 90.0}


def trainers(**step_s: float) -> dict[str, object]:
    rows = [{"case": name.replace("_", ", "), "packs": [pack(value)]} for name, value in step_s.items()]
    return {"cases": CASES, "rows": rows}


def by_text(results: gpu.Results) -> dict[str, dict[str, object]]:
    return {row["target"]: row for row in gpu.judged_targets(results)}


def test_the_best_case_of_each_side_is_compared():
    results = {"trainers": trainers(ours=0.5, ours_recomputed=0.7, other=0.9)}
    assert gpu.step_ratio(results) == pytest.approx(1.8)
    row = by_text(results)["HF + DeepSpeed / OLMo-core, both at their best"]
    assert row["met"] is False
    with pytest.raises(LookupError, match="hf_deepspeed"):
        gpu.step_ratio(results, recomputed=True)


def test_a_limit_itself_is_met():
    row = by_text({"trainers": trainers(ours=0.5)})["OLMo-core, full step of a pack of 10,240 tokens, 10 documents, s"]
    assert (row["value"], row["met"]) == (0.5, True)


def test_a_target_without_a_measurement_says_so():
    rows = gpu.judged_targets({"engine": {"rows": [{"case": "engine", "failed": "out of memory"}]}})
    assert all(row["met"] is None and "not measured" in row["why"] for row in rows)


def test_our_samples_are_held_against_trl_at_its_best():
    results = {
        "step": {"summary": {"equal_samples_per_s": 30.0}},
        "trl": {"summary": {"equal_samples_per_s": 12.0}},
    }
    assert gpu.samples_ratio(results, "equal") == 2.5


def test_the_report_shows_failures_targets_and_tables():
    parts = {
        "sync": {"summary": {"transfer_s": 0.2}, "rows": [], "table": "a table", "command": "gpu_sync.py"},
        "engine": {"rows": [{"case": "engine", "failed": "exit status 1"}]},
    }
    text = gpu.report(
        {
            "device": "card",
            "date": "today",
            "command": "python benchmarks/gpu.py",
            "seconds": 10.0,
            "versions": {"torch": "2"},
            "targets": gpu.judged_targets(parts),
            "figures": gpu.figures(parts),
            "parts": parts,
        }
    )
    assert "| weight sync, transfer with checksums, s | ≤ 0.150 | 0.200 | **missed** |" in text
    assert "- engine FAILED: exit status 1" in text
    assert "a table" in text


def test_parts_are_chosen_by_letter_or_name():
    assert [part.key for part in gpu.chosen_parts("c,trainers")] == ["a", "c"]
    with pytest.raises(ValueError, match="no part z"):
        gpu.chosen_parts("z")


def script(folder: Path, name: str, text: str) -> gpu.Part:
    (folder / name).write_text(text)
    return gpu.Part(key=name[0], name=name.removesuffix(".py"), script=str(folder / name), needs=None, limit_s=20)


WRITES = "import json, sys; json.dump({'rows': [], 'summary': {'x': 1}}, open(sys.argv[2], 'w')); print('seen')"


def test_a_part_that_dies_is_a_row_and_the_next_one_runs(tmp_path):
    runner = gpu.Runner(tmp_path, {}, seconds=100)
    runner.run([script(tmp_path, "bad.py", "raise SystemExit('no card')"), script(tmp_path, "good.py", WRITES)])
    assert "exit status 1" in runner.results["bad"]["rows"][0]["failed"]
    assert "no card" in runner.results["bad"]["rows"][0]["log"]
    assert runner.results["good"]["summary"] == {"x": 1}
    assert runner.results["good"]["table"] == "seen"


def test_parts_wait_for_the_card_and_what_has_no_time_or_model_left_is_a_row(tmp_path):
    needs = gpu.Part(key="m", name="model", script="none.py", needs="random", limit_s=1)
    late = gpu.Runner(tmp_path, {}, seconds=-1)
    late.run([needs])
    assert "s are over" in late.results["model"]["rows"][0]["failed"]
    without = gpu.Runner(tmp_path, {"random": "make-model failed"}, seconds=100)
    without.run([needs])
    assert "make-model failed" in without.results["model"]["rows"][0]["failed"]
