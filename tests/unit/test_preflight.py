"""Preflight: what is short is said in numbers, all of it at once."""

import pickle
import re
import socket
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from grpo_lib import preflight
from grpo_lib.config import RunConfig, resolve
from grpo_lib.data.models import ModelFacts
from grpo_lib.errors import ConfigError, PreflightError
from grpo_lib.preflight import (
    PACKAGES,
    Machine,
    Package,
    check_machine,
    installed,
    pool_machine,
    run_preflight,
    visible_gpus,
)
from grpo_lib.stages.store_check import store_check
from tests.unit.test_derived import QWEN_4B, TINY

GIB = 1 << 30
LARGE = Machine(cpus=2, memory_available_bytes=16 * GIB, memory_total_bytes=24 * GIB, gpus=0, disk_free_bytes=100 * GIB)


def embedded(*overrides: str) -> RunConfig:
    return resolve("embedded_addition", overrides)


def shortfalls(config: RunConfig, root: Path, *, facts: ModelFacts = TINY, machine: Machine = LARGE) -> list[str]:
    with pytest.raises(PreflightError) as caught:
        run_preflight(config, facts, root=root, machine=machine)
    return str(caught.value).splitlines()[1:]


def test_a_machine_that_can_hold_the_run(tmp_path: Path) -> None:
    result = run_preflight(embedded(), TINY, root=tmp_path / "not" / "yet", machine=LARGE)
    assert all(check.ok for check in result.checks)
    by_name = {check.name: check.detail for check in result.checks}
    assert by_name["CPUs"] == "2 ranks x 0.5 + 1 engine x 1 = 2 CPUs of 2"
    assert by_name["GPUs"] == "2 ranks x 0 + 1 engine x 0 = 0 GPUs of 0 visible"
    assert not (tmp_path / "not").exists()
    assert pickle.loads(pickle.dumps(result)) == result  # it becomes an artifact of the flow


def test_cpu_shortfall_spells_out_the_budget(tmp_path: Path) -> None:
    (line,) = shortfalls(embedded("trainer.num_ranks=8", "rollout.num_engines=2"), tmp_path)
    assert "8 ranks x 0.5 + 2 engines x 1 = 6 CPUs of 2" in line
    assert "runtime.cpus_per_rank" in line


def test_a_budget_that_just_fits_passes(tmp_path: Path) -> None:
    config = embedded("trainer.num_ranks=4", "runtime.cpus_per_rank=0.25")
    assert run_preflight(config, TINY, root=tmp_path, machine=LARGE)
    assert shortfalls(config, tmp_path, machine=replace(LARGE, cpus=1.9))


def test_gpu_shortfall(tmp_path: Path) -> None:
    config = embedded("runtime.gpus_per_rank=1", "runtime.gpus_per_engine=1", "weight_sync.backend=nccl")
    (line,) = shortfalls(config, tmp_path, machine=replace(LARGE, gpus=2))
    assert "2 ranks x 1 + 1 engine x 1 = 3 GPUs of 2 visible" in line
    assert run_preflight(config, TINY, root=tmp_path, machine=replace(LARGE, gpus=3))


def card(*overrides: str) -> RunConfig:
    """One rank and one engine on one GPU."""
    return embedded(
        "trainer.num_ranks=1", "weight_sync.backend=ipc", "runtime.gpus_per_rank=0.5", "runtime.gpus_per_engine=0.5",
        *overrides,
    )  # fmt: skip


ONE_GPU = replace(LARGE, gpus=1, gpu_memory_bytes=80 * GIB, memory_available_bytes=64 * GIB, disk_free_bytes=1000 * GIB)


def test_ranks_and_engines_must_fit_the_card_they_share(tmp_path: Path) -> None:
    result = run_preflight(card(), TINY, root=tmp_path, machine=ONE_GPU)
    (check,) = (check for check in result.checks if check.name == "GPU memory")
    assert "1 x 20.0 GiB engines (rollout.gpu_memory_share 0.25" in check.detail
    # 16 bytes for each of 4e9 fp32 parameters are 59.6 GiB of masters, gradients and moments
    (line,) = shortfalls(card("rollout.gpu_memory_share=0.5"), tmp_path, facts=QWEN_4B, machine=ONE_GPU)
    assert "- GPU memory:" in line
    assert "1 x 40.0 GiB engines (rollout.gpu_memory_share 0.5" in line
    assert "rollout.sleep_while_training=true" in line


def test_a_sleeping_engine_makes_room_for_training_but_not_for_rollouts(tmp_path: Path) -> None:
    awake = ("trainer.pack_length=12288", "trainer.micro_batch_packs=1")
    machine = replace(ONE_GPU, gpu_memory_bytes=141 * GIB)
    assert "- GPU memory" in shortfalls(card(*awake), tmp_path, facts=QWEN_4B, machine=machine)[0]
    asleep = ("rollout.sleep_while_training=true", *awake)
    assert run_preflight(card(*asleep), QWEN_4B, root=tmp_path, machine=machine)
    lines = shortfalls(card("rollout.gpu_memory_share=0.9", *asleep), tmp_path, facts=QWEN_4B, machine=machine)
    assert "- GPU memory" in lines[0], "while it is awake its share and the idle rank must still fit"


def test_a_share_that_leaves_no_cache(tmp_path: Path) -> None:
    machine = replace(ONE_GPU, gpu_memory_bytes=24 * GIB)
    config = card("rollout.gpu_memory_share=0.1")
    (line,) = shortfalls(config, tmp_path, machine=replace(machine, gpu_memory_bytes=20 * GIB))
    assert "the cache must hold one sample" in line
    assert "raise rollout.gpu_memory_share" in line


def test_a_card_of_unknown_size_is_not_judged(tmp_path: Path) -> None:
    result = run_preflight(card(), QWEN_4B, root=tmp_path, machine=replace(ONE_GPU, gpu_memory_bytes=None))
    (check,) = (check for check in result.checks if check.name == "GPU memory")
    assert (check.ok, "not judged" in check.detail) == (True, True)


def test_memory_and_disk_shortfalls_of_a_large_model_come_together(tmp_path: Path) -> None:
    lines = shortfalls(embedded("rollout.kv_cache_mib=1024"), tmp_path, facts=QWEN_4B)
    assert [line.split(":")[0].strip() for line in lines] == ["- memory", "- disk"]
    assert "16.0 GiB available" in lines[0]
    assert "44.7 GiB copy of the state that checkpoints are written from" in lines[0]
    assert "trainer.pack_length" in lines[0]
    assert "3 checkpoints of 44.7 GiB" in lines[1]
    assert "100.0 GiB free" in lines[1]


def test_a_storage_root_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    (line,) = shortfalls(embedded(), file)
    assert f"{file} is not a writable folder" in line


def test_a_port_in_use_and_a_free_one(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        (line,) = shortfalls(embedded(f"weight_sync.port={port}"), tmp_path)
        assert f"weight_sync.port ({port})" in line
        assert "in use" in line
    assert run_preflight(embedded(f"weight_sync.port={port}"), TINY, root=tmp_path, machine=LARGE)


def test_a_model_that_does_not_fit_the_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="20 positions"):
        run_preflight(embedded(), replace(TINY, max_position=20), root=tmp_path, machine=LARGE)


@pytest.mark.parametrize(
    ("package", "parts"),
    [
        (
            Package(names=(("no-such-package", ">=1"), ("nor-this", "<2"))),
            ["no-such-package >=1 or nor-this <2", "make"],
        ),
        (Package(names=(("numpy", ">=99"),)), ["numpy", "outside >=99", "make setup"]),
    ],
)
def test_missing_and_unfit_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: Package, parts: list[str]
) -> None:
    monkeypatch.setattr(preflight, "PACKAGES", (package,))
    (line,) = shortfalls(embedded(), tmp_path)
    assert [part for part in parts if part not in line] == []


def test_packages_are_asked_for_only_where_they_are_needed() -> None:
    names = {package.names[0][0]: package for package in PACKAGES}
    assert not names["wandb"].needed(embedded())
    assert names["wandb"].needed(embedded("tracking.wandb=true"))
    for backend, package in (("olmo_core", "ai2-olmo-core"), ("hf_deepspeed", "deepspeed")):
        assert names[package].needed(embedded(f"trainer.backend={backend}"))
        other = "hf_deepspeed" if backend == "olmo_core" else "olmo_core"
        assert not names[package].needed(embedded(f"trainer.backend={other}"))
    assert installed(names["numpy"])[1] is not None


def test_ranges_are_those_of_the_project() -> None:
    """The table exists because a cluster's code package is no installed distribution; it must not drift."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["cuda"]]
    lines += [line for line in project["optional-dependencies"]["cpu"] if line.startswith("vllm")]
    declared = {requirement.name: requirement.specifier for requirement in map(Requirement, lines)}
    for package in PACKAGES:
        for name, wanted in package.names:
            assert SpecifierSet(wanted) == declared[name], name


def test_visible_gpus_follow_the_device_files_and_the_environment(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm", "sda"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == 3
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,2"}, tmp_path) == 2
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == 0
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,-1,2"}, tmp_path) == 1
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, tmp_path) == 3
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-3b2d"}, tmp_path) == 1


def test_container_limits_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_CGROUP", tmp_path)
    free = preflight.inspect_machine(tmp_path)
    assert free.cpus == len(preflight.os.sched_getaffinity(0))
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    (tmp_path / "memory.max").write_text(f"{GIB}\n")
    (tmp_path / "memory.current").write_text(f"{GIB // 2}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {GIB // 4}\n")
    limited = preflight.inspect_machine(tmp_path)
    assert limited.cpus == 0.5
    assert limited.memory_total_bytes == GIB
    assert limited.memory_available_bytes == GIB - GIB // 2 + GIB // 4
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert preflight.inspect_machine(tmp_path).cpus == free.cpus
    assert preflight.inspect_machine(tmp_path).memory_total_bytes == free.memory_total_bytes


def test_this_machine_is_described_without_torch(tmp_path: Path) -> None:
    checks = check_machine(embedded(), TINY, root=tmp_path).checks
    cpus = next(check for check in checks if check.name == "CPUs")
    assert re.search(r"= 2 CPUs of [\d.]+", cpus.detail)


def test_a_pool_is_checked_in_place_of_this_machine() -> None:
    pool = {"cpu": 4, "memory": 16384, "disk": 51200, "gpu": 8, "image": "grpo:latest"}
    machine = pool_machine(pool)
    assert (machine.cpus, machine.gpus) == (4.0, 8)
    assert machine.memory_available_bytes == 16_384_000_000
    assert machine.disk_free_bytes == 51_200_000_000
    assert pool_machine({}).gpus == 0


def test_a_store_that_cannot_be_reached_is_a_shortfall(s3_variables: None, tmp_path: Path) -> None:
    config = embedded("storage.store=s3://nobody-made-it/p")
    with pytest.raises(PreflightError, match=r"store: cannot write s3://nobody-made-it/p/checks/.* create the bucket"):
        run_preflight(config, TINY, root=tmp_path, machine=LARGE, more=[store_check(config)])


def test_stores_that_can_be_written(bucket: str, tmp_path: Path) -> None:
    assert store_check(embedded(f"storage.store=s3://{bucket}/p")).detail == f"s3://{bucket}/p can be written and read"
    assert store_check(embedded(f"storage.store={tmp_path / 'not' / 'yet'}")).ok
    (tmp_path / "file").touch()
    refused = store_check(embedded(f"storage.store={tmp_path / 'file' / 'store'}"))
    assert not refused.ok
    assert f"{tmp_path / 'file'} is not a writable folder; set storage.store" in refused.detail


def test_steps_on_machines_of_their_own_need_a_way_to_hand_files_on(bucket: str) -> None:
    remote = embedded(f"storage.store=s3://{bucket}/p")
    refused = store_check(embedded(), pool={"cpu": 4})
    assert not refused.ok
    assert "storage.root (runs) would be another folder on each: set storage.store=s3://" in refused.detail
    assert not store_check(remote, pool={"cpu": 4}, by_store=False).ok
    assert store_check(remote, pool={"cpu": 4}).ok
    assert store_check(embedded(), pool={"cpu": 4, "persistent_volume_claims": {"runs": "/runs"}}).ok
