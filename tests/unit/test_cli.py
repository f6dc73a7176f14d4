"""The `grpo` command as a user meets it: output, exit codes, speed, and no traceback."""

import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_lib.cli import main
from grpo_lib.config import config_hash, resolve
from grpo_lib.data.models import BUILTIN_FOLDER

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_validate_prints_the_configuration_and_what_follows(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run("validate", "--set", "loop.steps=10", capsys=capsys)
    assert (code, err) == (0, "")
    assert "\nloop:\n  steps: 10  # default 150\n" in out
    assert "  prompts_per_step: 16\n" in out  # a default is not remarked on
    for line in (
        "samples                 256 per step, 2,560 in all",
        "tokens per step         at most 5,632, of which 1,536 response",
        "packs per step          4 ... 52",
        "reserved                2 CPUs, 0 GPUs",
    ):
        assert line in out
    assert "memory of a rank" in out
    assert f"hash: {config_hash(resolve('embedded_addition', ['loop.steps=10']))}" in out


def test_validate_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("validate", "--json", "--seed", "5", "--trainer", "hf_deepspeed", capsys=capsys)
    plain = json.loads(out)
    assert code == 0
    assert plain["config"]["seed"] == 5
    assert plain["config"]["trainer"]["backend"] == "hf_deepspeed"
    assert plain["hash"] == config_hash(resolve("embedded_addition", seed=5, trainer="hf_deepspeed"))
    assert plain["derived"]["packs_per_step"] == {"low": 4, "high": 52}


def test_wrong_values_end_with_all_problems_and_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(
        *("validate", "--recipe", "embeded_addition", "--set", "trainer.lerning_rate=1"),
        *("--set", "rollout.group_size=1", "--set", "rollout.max_tokens=400", "--set", "model.dtype=float64"),
        capsys=capsys,
    )
    assert (code, out) == (2, "")
    lines = err.splitlines()
    assert lines[0] == "grpo: 6 problems:"
    for number, part in enumerate(
        (
            "did you mean embedded_addition?",
            "trainer.lerning_rate is not a setting; did you mean trainer.learning_rate?",
            "model.dtype (float64)",
            "trainer.pack_length (128)",
            "rollout.group_size (1)",
            "256 positions",  # between the configuration and its model
        ),
        start=1,
    ):
        assert part in lines[number]


@pytest.mark.parametrize(
    ("break_it", "part"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "model.path"),
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
        (lambda folder: shutil.rmtree(folder), "model.path"),
    ],
)
def test_an_unusable_model_is_reported_with_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], break_it, part: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(BUILTIN_FOLDER / "tiny_qwen3", folder)
    break_it(folder)
    code, _, err = run(*("validate", "--set", f"model.path={folder}", "--set", "rollout.group_size=1"), capsys=capsys)
    assert code == 2
    assert err.startswith("grpo: 2 problems:\n")
    assert part in err
    assert "rollout.group_size (1)" in err


@pytest.mark.parametrize("arguments", [[], ["valdate"], ["validate", "--sed", "x"], ["validate", "--seed", "x"]])
def test_a_wrong_command_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "usage: grpo" in capsys.readouterr().err


def test_preflight_lists_every_check(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = run("preflight", "--set", f"storage.root={tmp_path}", capsys=capsys)
    short = [line for line in out.splitlines() if line.startswith("SHORT")]
    assert code == (1 if short else 0)
    assert "CPUs" in out
    assert "2 ranks x 0.5 + 1 engine x 1 = 2 CPUs of" in out
    assert bool(err) == bool(short)


def test_preflight_shortfalls_exit_1(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = run(
        *("preflight", "--set", f"storage.root={tmp_path}", "--trainer", "hf_deepspeed"),
        *("--set", "trainer.num_ranks=100000"),
        capsys=capsys,
    )
    assert code == 1
    assert "SHORT  CPUs" in out
    assert "deepspeed 0.19.8" in out
    assert "100000 ranks x 0.5 + 1 engine x 1 = 50001 CPUs of" in out
    assert "falls short in" in err


def test_doctor_reports_the_environment(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    code, out, _ = run("doctor", capsys=capsys)
    assert code == 0
    assert "package     torch 2." in out
    assert "module      vllm: /" in out
    assert "note        RAY_ADDRESS=10.0.0.1:6379 is set; runs start their own cluster and ignore it" in out


def test_doctor_fails_where_a_package_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from grpo_lib.preflight import Package

    monkeypatch.setattr("grpo_lib.preflight.PACKAGES", (Package(names=(("no-such-package", ">=1"),)),))
    code, out, _ = run("doctor", capsys=capsys)
    assert code == 1
    assert "no-such-package >=1: not installed" in out


def test_a_stale_ray_address_file_is_only_a_note(tmp_path: Path) -> None:
    from grpo_lib.cli import _leftovers

    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:6379\n")
    (note,) = _leftovers(tmp_path, {})
    assert "127.0.0.1:6379" in note
    assert "ignore it" in note


def test_validate_is_quick_and_imports_nothing_heavy() -> None:
    """CPU time of the whole process: wall time on a shared machine says little."""
    program = (
        "import sys; from grpo_lib.cli import main; main(['validate']); "
        "heavy = {'torch', 'transformers', 'ray', 'vllm', 'scipy', 'metaflow', 'huggingface_hub'} & set(sys.modules); "
        "print(sorted(heavy), file=sys.stderr)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.stderr == "[]\n"
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0


def test_the_installed_command_has_no_traceback() -> None:
    command = Path(sys.executable).with_name("grpo")
    done = subprocess.run(
        [command, "validate", "--set", "trainer.lerning_rate=1"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "did you mean trainer.learning_rate?" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
