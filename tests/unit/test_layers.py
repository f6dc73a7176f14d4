"""Imports point down, and heavy packages have one home."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "grpo_lib"

L0 = {"types", "interfaces", "config", "rules", "placement", "recipes", "errors", "seeds", "timing"}
L1 = {"algo", "data", "verifiers"}
L2 = {"loop", "pipeline", "evaluate", "parity", "derived", "preflight"}
L3 = {"trainers", "rollout", "weight_sync", "distributed", "ray_runtime", "storage", "tracking", "metaflow_runs"}
L4 = {"stages", "cli", "cli_lineage", "cli_models", "cli_parity", "cli_store", "cli_run"}
ALLOWED_SIBLINGS = {("weight_sync", "distributed")}

HOMES = {
    "ray": ("grpo_lib/ray_runtime/",),
    "vllm": ("grpo_lib/rollout/", "grpo_lib/weight_sync/"),
    "olmo_core": ("grpo_lib/trainers/olmo_core",),
    "deepspeed": ("grpo_lib/trainers/hf_deepspeed",),
    "metaflow": ("flows/", "grpo_lib/metaflow_runs.py"),
    "boto3": ("grpo_lib/storage/",),
    "botocore": ("grpo_lib/storage/",),
}


def imports_of(source: str) -> Iterator[str]:
    """Dotted names of every import statement, those inside functions included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part_of(dotted: str) -> str | None:
    """`grpo_lib.algo.losses` → `algo`; None outside the package."""
    pieces = dotted.split(".")
    return pieces[1] if pieces[0] == "grpo_lib" and len(pieces) > 1 else None


def level(part: str) -> int:
    for number, parts in enumerate((L0, L1, L2, L3, L4)):
        if part in parts:
            return number
    raise AssertionError(f"grpo_lib/{part} has no layer; give it one here and in docs/architecture.md")


def violation(importer: str, imported: str) -> str | None:
    """Why `importer` may not import `imported`, both parts of the package; None when it may."""
    if importer == imported or (importer, imported) in ALLOWED_SIBLINGS:
        return None
    here, there = level(importer), level(imported)
    if there > here:
        return f"{importer} (L{here}) imports upwards from {imported} (L{there})"
    if (here, there) == (3, 2):
        return f"{importer} (L3) imports policy from {imported} (L2)"
    if here == there == 3:
        return f"{importer} and {imported} are siblings of L3"
    return None


def sources() -> list[Path]:
    found = sorted([*PACKAGE.rglob("*.py"), *(ROOT / "flows").rglob("*.py")])
    assert PACKAGE / "loop.py" in found, "a rule over no files holds"
    assert ROOT / "flows" / "grpo_flow.py" in found
    return found


def test_imports_point_down() -> None:
    found = []
    for path in (path for path in sources() if path.is_relative_to(PACKAGE)):
        importer = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if importer == "__init__":
            continue
        for dotted in imports_of(path.read_text()):
            imported = part_of(dotted)
            if imported and imported[0].islower() and (reason := violation(importer, imported)):
                found.append(f"{path.relative_to(ROOT)}: {reason}")
    assert not found, "\n".join(found)


def test_the_rule_notices_a_violation() -> None:
    assert violation("algo", "loop")
    assert violation("trainers", "rollout")
    assert violation("storage", "parity")
    assert violation("types", "algo")
    assert violation("weight_sync", "distributed") is None
    assert list(imports_of("def f():\n    import ray.util\n    from vllm import LLM")) == [
        "ray.util",
        "vllm",
        "vllm.LLM",
    ]


def test_heavy_packages_have_one_home() -> None:
    found = []
    for path in sources():
        name = path.relative_to(ROOT).as_posix()
        for dotted in imports_of(path.read_text()):
            homes = HOMES.get(dotted.split(".")[0])
            if homes and not name.startswith(homes):
                found.append(f"{name} imports {dotted}, whose home is {', '.join(homes)}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import grpo_lib.cli", {"torch", "transformers", "ray", "vllm", "olmo_core", "metaflow", "wandb", "boto3"}),
        (
            "import grpo_lib.stages.begin",
            {"torch", "transformers", "ray", "vllm", "olmo_core", "metaflow", "wandb", "boto3"},
        ),
        (
            "import grpo_lib.loop, grpo_lib.pipeline, grpo_lib.evaluate, grpo_lib.tracking",
            {"ray", "vllm", "olmo_core", "metaflow", "transformers", "wandb", "boto3"},
        ),
        ("import grpo_lib.verifiers.pool", {"torch", "transformers", "ray", "vllm"}),
        ("import grpo_lib.trainers.olmo_core", {"ray", "vllm", "metaflow", "deepspeed"}),
        ("import grpo_lib.trainers.hf_deepspeed", {"ray", "vllm", "metaflow", "olmo_core", "deepspeed"}),
        ("import grpo_lib.stages.trainer_rank", {"olmo_core", "deepspeed", "transformers"}),
        ("import grpo_lib.weight_sync.sync", {"vllm", "ray"}),
    ],
)
def test_importing_stays_light(statement: str, absent: set[str]) -> None:
    program = f"{statement}\nimport sys\nprint(*sorted({absent!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [], f"{statement} imports {done.stdout.strip()}"
