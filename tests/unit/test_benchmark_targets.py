"""What the one command says about its targets: met, missed, or not measured, and never silent."""

import json
from pathlib import Path

import gpu
import psutil
import pytest
from gpu_parts import Part, Results, Runner

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


def by_text(results: Results) -> dict[str, dict[str, object]]:
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
        "sync": {
            "summary": {"transfer_s": 0.2},
            "rows": [],
            "table": "a table",
            "command": "gpu_sync.py",
            "card_s": 9.0,
        },
        "engine": {"rows": [{"case": "engine", "failed": "exit status 1\n  at once"}]},
        "trainers": {"rows": [{"case": "late", "failed": "not run: 1 s is over", "skipped": True}]},
        "parity": {"targets": [{"target": "mean |d|", "value": 1.0, "limit": 2.0, "met": True}]},
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
    assert "## c sync: the certified weight push\n\n`gpu_sync.py`, 9 s of the card\n" in text
    assert "\n- engine FAILED: exit status 1 at once\n" in text, "a bullet is one line"
    assert "\n- late: not run: 1 s is over\n" in text
    assert r"| parity, mean \|d\| | ≤ 2 | 1 | met |" in text
    assert "a table" in text


def test_parts_are_chosen_by_letter_or_name():
    assert [part.key for part in gpu.chosen_parts("c,trainers")] == ["a", "c"]
    with pytest.raises(ValueError, match="no part z"):
        gpu.chosen_parts("z")


def script(folder: Path, name: str, text: str, *, limit_s: float = 20) -> Part:
    (folder / name).write_text(text)
    part = name.removesuffix(".py")
    return Part(key=part[0], name=part, title="a test", script=str(folder / name), needs=None, limit_s=limit_s)


def run(folder: Path, *parts: Part, seconds: float = 100, **models: str) -> tuple[Results, list[list[str]]]:
    """Results, and the parts that were there each time they were kept."""
    seen: list[list[str]] = []
    runner = Runner(folder, models, seconds=seconds, keep=lambda found: seen.append(list(found)))
    runner.run(parts)
    return runner.results, seen


def is_over(pid: int) -> bool:
    """Gone, or dead and not yet fetched by whoever inherited it."""
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


WRITES = "import json, sys; json.dump({'rows': [], 'summary': {'x': 1}}, open(sys.argv[2], 'w')); print('seen')\n"


def test_a_part_that_dies_is_a_row_and_the_next_one_runs(tmp_path):
    bad, good = script(tmp_path, "bad.py", "raise SystemExit('no card')"), script(tmp_path, "good.py", WRITES)
    results, seen = run(tmp_path, bad, good)
    assert "exit status 1" in results["bad"]["rows"][0]["failed"]
    assert "no card" in results["bad"]["rows"][0]["log"]
    assert results["good"]["summary"] == {"x": 1}
    assert results["good"]["table"] == "seen"
    assert seen == [["bad"], ["bad", "good"]]


def test_a_part_over_its_limit_keeps_what_it_wrote_and_leaves_no_process(tmp_path):
    child = tmp_path / "child.pid"
    forks = (
        "import pathlib, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '300'], start_new_session=True)\n"
        f"pathlib.Path({str(child)!r}).write_text(str(child.pid)); time.sleep(300)\n"
    )
    results, _ = run(tmp_path, script(tmp_path, "slow.py", WRITES + forks, limit_s=3))
    assert results["slow"]["summary"] == {"x": 1}
    assert "stopped after 3 s" in results["slow"]["rows"][0]["failed"]
    assert is_over(int(child.read_text()))


def test_what_a_part_leaves_behind_is_ended_too(tmp_path):
    child = tmp_path / "child.pid"
    orphan = (
        "import pathlib, subprocess\n"
        "child = subprocess.Popen(['sleep', '300'], start_new_session=True)\n"
        f"pathlib.Path({str(child)!r}).write_text(str(child.pid))\n"
    )
    results, _ = run(tmp_path, script(tmp_path, "left.py", WRITES + orphan))
    assert results["left"]["ended_by_force"] == ["sleep"]
    assert is_over(int(child.read_text()))


def test_a_part_does_not_get_the_card_before_its_turn(tmp_path):
    order = tmp_path / "order"
    takes = (
        "import fcntl, sys, time\n"
        "fcntl.flock(open(sys.argv[4], 'a'), fcntl.LOCK_EX)\n"
        f"out = open({str(order)!r}, 'a'); print(sys.argv[0], file=out, flush=True); time.sleep(float({{}}))\n"
    )
    first = script(tmp_path, "first.py", "import time; time.sleep(1)\n" + takes.format(1) + WRITES)
    second = script(tmp_path, "second.py", takes.format(0) + WRITES)
    run(tmp_path, first, second)
    assert [Path(line).name for line in order.read_text().split()] == ["first.py", "second.py"]


def test_what_has_no_time_or_model_left_is_a_row(tmp_path):
    needs = Part(key="m", name="model", title="a test", script="none.py", needs="random", limit_s=1)
    assert "s are over" in run(tmp_path, needs, seconds=-1)[0]["model"]["rows"][0]["failed"]
    without, _ = run(tmp_path, needs, random="make-model failed")
    assert "make-model failed" in without["model"]["rows"][0]["failed"]


def test_parts_of_an_earlier_command_are_in_the_report(tmp_path):
    before = {"sync": {"rows": [], "summary": {"transfer_s": 0.1}}, "engine": {"rows": [], "summary": {}}}
    about = {"device": "card", "date": "today", "command": "gpu.py", "versions": {}}
    kept = gpu.Report(about=about, before=before, out=tmp_path / "o.json", table=tmp_path / "o.md", began=0.0)
    text = kept.write({"engine": {"rows": [{"case": "engine", "failed": "died"}]}})
    assert "| 0.100 | met |" in text
    assert "engine FAILED: died" in text
    assert (tmp_path / "o.md").read_text() == text
    assert set(json.loads((tmp_path / "o.json").read_text())["parts"]) == {"sync", "engine"}
