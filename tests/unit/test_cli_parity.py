"""`grpo parity` as a user meets it: verdicts become exit codes, mistakes are named, and no stage is loaded for one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from grpo_lib import stages
from grpo_lib.cli import main
from grpo_lib.config import TRAINERS, config_hash, resolve
from grpo_lib.errors import RankFailure
from grpo_lib.stages.run_paths import RunPaths
from grpo_lib.stages.stored_run import StoredRun, write_run

ROOT = Path(__file__).resolve().parents[2]
Outcome = tuple[int, str, str]
Grpo = Callable[..., Outcome]


@pytest.fixture
def grpo(capsys: pytest.CaptureFixture[str]) -> Grpo:
    def call(*arguments: str) -> Outcome:
        try:
            code = main(["parity", *arguments])
        except SystemExit as stop:  # argparse ends the process for what it refuses
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A run that has only started."""
    config = resolve("embedded_addition", [f"storage.root={tmp_path}"])
    paths = RunPaths.of(config, "GRPOFlow/1")
    write_run(paths, run_id="GRPOFlow/1", config=config, config_hash=config_hash(config), lineage={})
    return str(paths.run)


def report(verdict: str = "PASS") -> dict[str, Any]:
    check = {
        "name": "a check", "verdict": verdict, "value": 0.5, "tolerance": 1.0, "num_observations": 7, "evidence": "why",
    }  # fmt: skip
    return {"verdict": verdict, "checks": [check], "tables": {"steps": [{"step": 1, "distance": 0.25}]}}


def _without_causes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bisect that finds nothing, for the reports of replay."""
    module = ModuleType("grpo_lib.stages.parity_bisect")
    module.__dict__.update(causes_of=lambda report, run, *, trainers: {}, with_causes=lambda report, causes: report)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(stages, "parity_bisect", module, raising=False)


class Stage:
    """Stands in for `run` of a stage module and keeps what it was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, answer: dict[str, Any] | Exception) -> None:
        module = ModuleType(f"grpo_lib.stages.{name}")
        module.__dict__["run"] = self
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(stages, name, module, raising=False)
        if name == "parity_replay":
            _without_causes(monkeypatch)
        self._answer = answer
        self.runs: list[Any] = []
        self.options: dict[str, Any] = {}

    def __call__(self, *runs: Any, **options: Any) -> dict[str, Any]:
        self.runs, self.options = list(runs), options
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


@pytest.mark.parametrize(("verdict", "code"), [("PASS", 0), ("FAIL", 1), ("INCONCLUSIVE", 3)])
@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("probe", ()),
        ("replay", ()),
        ("compare", ("FOLDER",)),
        ("bisect", ("--a", "olmo_core", "--b", "hf")),
    ],
)
def test_the_verdict_is_the_exit_code(
    grpo: Grpo,
    folder: str,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    options: tuple[str, ...],
    verdict: str,
    code: int,
) -> None:
    Stage(monkeypatch, f"parity_{command}", report(verdict))
    found, out, err = grpo(command, folder, *(folder if text == "FOLDER" else text for text in options))
    assert (found, err) == (code, "")
    assert f"{verdict}: " in out
    assert "0.25" in out, "tables are part of the text"


def test_probe_and_replay_pass_their_options_on(grpo: Grpo, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Stage(monkeypatch, "parity_probe", report())
    assert grpo("probe", folder, "--trainer", "hf_deepspeed", "--trainer", "hf_deepspeed")[0] == 0
    assert probe.options == {"trainers": ("hf_deepspeed",)}
    assert grpo("probe", folder)[0] == 0
    assert probe.options == {"trainers": TRAINERS}
    replay = Stage(monkeypatch, "parity_replay", report())
    assert grpo("replay", folder)[0] == 0
    assert replay.options == {"trainers": TRAINERS, "steps": None, "modes": ("lockstep", "free")}
    assert grpo("replay", folder, "--steps", "5", "--mode", "free")[0] == 0
    assert replay.options == {"trainers": TRAINERS, "steps": 5, "modes": ("free",)}


def test_bisect_passes_its_options_on(grpo: Grpo, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bisect = Stage(monkeypatch, "parity_bisect", report())
    assert grpo("bisect", folder, "--a", "olmo_core", "--b", "engine", "--step", "7")[0] == 0
    assert bisect.options == {"a": "olmo_core", "b": "engine", "step": 7}


def test_compare_takes_several_seeds_a_side(grpo: Grpo, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compare = Stage(monkeypatch, "parity_compare", report())
    code, _, _ = grpo("compare", f"{folder}, {folder}", folder, "--differs", "trainer.learning_rate")
    assert code == 0
    assert [len(side) for side in compare.runs] == [2, 1]
    assert compare.options == {"differs": ["trainer.learning_rate"]}


def test_tolerances_can_be_set_and_what_the_run_was_made_with_cannot(
    grpo: Grpo, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = Stage(monkeypatch, "parity_probe", report())
    assert grpo("probe", folder, "--set", "parity.min_tokens=5", "--set", "parity.max_abs=1e-3")[0] == 0
    run: StoredRun = probe.runs[0]
    assert (run.config.parity.min_tokens, run.config.parity.max_abs) == (5, 1e-3)
    for override, message in (
        ("loop.steps=5", "a stored run keeps its settings; only parity.* can be set"),
        ("parity.min_token=5", "did you mean parity.min_tokens?"),
        ("parity.min_tokens=0", "parity.min_tokens (0)"),
    ):
        code, out, err = grpo("probe", folder, "--set", override)
        assert (code, out) == (2, "")
        assert message in err


def test_json_is_the_report_and_nothing_else(grpo: Grpo, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Stage(monkeypatch, "parity_probe", report("FAIL"))
    code, out, _ = grpo("probe", folder, "--json")
    assert (code, json.loads(out)) == (1, report("FAIL"))


def test_html_is_written_whatever_the_verdict(
    grpo: Grpo, folder: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Stage(monkeypatch, "parity_probe", report("FAIL"))
    page = tmp_path / "new" / "page.html"
    assert grpo("probe", folder, "--html", str(page))[0] == 1
    assert "grpo parity probe: <span class='FAIL'>FAIL</span>" in page.read_text()
    code, _, err = grpo("probe", folder, "--html", str(page / "below-a-file.html"))
    assert code == 2
    assert "cannot write" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("probe", "/no/such/run"), "neither the folder of a run nor a Metaflow run id"),
        (("probe", str(ROOT)), "run.json, which the start step writes, is missing"),
        (("compare", "FOLDER", "FOLDER"), "metrics.jsonl is missing; the step fit writes it"),
        (("compare", "FOLDER"), "the following arguments are required: RUN_B"),
        (("replay", "FOLDER", "--steps", "0"), "0 is not a positive number"),
        (("replay", "FOLDER", "--mode", "fast"), "invalid choice: 'fast'"),
        (("probe", "FOLDER", "--trainer", "megatron"), "invalid choice: 'megatron'"),
        (("bisect", "FOLDER", "--a", "olmo_core"), "the following arguments are required: --b"),
        (("prove", "FOLDER"), "invalid choice: 'prove'"),
    ],
)
def test_a_mistake_ends_with_a_message_and_exit_2(
    grpo: Grpo, folder: str, arguments: tuple[str, ...], message: str
) -> None:
    code, out, err = grpo(*(folder if text == "FOLDER" else text for text in arguments))
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_a_part_that_failed_is_no_verdict(grpo: Grpo, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Stage(monkeypatch, "parity_replay", RankFailure("trainer rank 1 died"))
    code, out, err = grpo("replay", folder)
    assert (code, out) == (2, "")
    assert err == "grpo parity: no verdict:\n  - trainer rank 1 died\n"


def test_a_reader_that_has_seen_enough(folder: str) -> None:
    """`grpo parity probe RUN | head` keeps its exit code and prints no traceback."""
    program = (
        "import sys, types; from grpo_lib import stages; from grpo_lib.cli import main; "
        "stage = types.ModuleType('grpo_lib.stages.parity_probe'); sys.modules[stage.__name__] = stage; "
        "stages.parity_probe = stage; stage.run = lambda run, trainers: "
        "{'verdict': 'FAIL', 'checks': [], 'tables': {'x': [{'y': 'z' * 30}] * 40, 'w': [{'y': 'z' * 30}] * 40}}; "
        f"sys.exit(main(['parity', 'probe', {folder!r}]))"
    )
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=writer, stderr=subprocess.PIPE, text=True, check=False, cwd=ROOT
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("command", ["probe", "replay", "compare", "bisect"])
def test_help_has_examples(grpo: Grpo, command: str) -> None:
    code, out, _ = grpo(command, "-h")
    assert code == 0
    assert f"  grpo parity {command} " in out.partition("examples:")[2]


def test_a_mistake_loads_neither_torch_nor_ray() -> None:
    program = (
        "import sys; from grpo_lib.cli import main; code = main(['parity', 'replay', '/no/such/run']); "
        "print(code, *sorted({'torch', 'ray', 'vllm', 'metaflow', 'scipy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.stdout == "2\n", done.stderr
