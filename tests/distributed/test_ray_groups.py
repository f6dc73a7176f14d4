"""One small Ray cluster for all tests of the actor groups; members are light objects."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
import ray
import torch
from safetensors.torch import load_file

from grpo_lib.config import DeadlinesConfig, LoopConfig, RuntimeConfig
from grpo_lib.errors import DeadlineExceeded, PreflightError, RankFailure, StalenessError
from grpo_lib.ray_runtime.actor_group import ActorGroup
from grpo_lib.ray_runtime.cluster import local_cluster
from grpo_lib.ray_runtime.engine_group import EngineGroup, engine_actors
from grpo_lib.ray_runtime.trainer_group import RayTrainerGroup
from grpo_lib.stages.checkpoints import CheckpointState, CheckpointWriter, newest_complete
from grpo_lib.stages.run_paths import RunPaths
from grpo_lib.types import GenerationRequest, PackedBatch, SamplingParams, StepPlan, WrittenFile
from tests.distributed.ray_members import Engine, Member, Rank, broken_factory
from tests.unit.fakes import FakeTrainer

WAIT = {"deadline_s": 60.0, "setting": "deadlines.train_s"}
BIG = 32 << 20  # numbers that take a good part of a second to write
STALE_ADDRESS = "10.255.255.1:6379"  # a cluster that was killed: nobody answers there


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """A cluster started beside a stale address file, as a killed run leaves it."""
    address_file = Path("/tmp/ray/ray_current_cluster")
    before = address_file.read_text() if address_file.exists() else None
    address_file.parent.mkdir(parents=True, exist_ok=True)
    address_file.write_text(STALE_ADDRESS)
    try:
        with local_cluster(RuntimeConfig(object_store_mib=80), num_cpus=4):
            yield
        assert not ray.is_initialized()
    finally:
        if before is None:
            address_file.unlink(missing_ok=True)
        else:
            address_file.write_text(before)


@pytest.fixture(scope="module")
def members(cluster: None) -> Iterator[ActorGroup]:
    group = ActorGroup(
        "trainer rank", [partial(Member, i) for i in range(2)], num_cpus=0.5, env_vars={"OMP_NUM_THREADS": "1"}
    )
    group.start(deadline_s=120.0, setting="deadlines.ranks_start_s")
    yield group
    group.close()


def test_calls_reach_every_member_in_order(members: ActorGroup) -> None:
    where = members.call("where", **WAIT)
    assert [index for index, _, _ in where] == [0, 1]
    assert len({pid for _, pid, _ in where} | {os.getpid()}) == 3
    assert {threads for _, _, threads in where} == {"1"}
    assert members.call("add", 10, b=100, **WAIT) == [110, 111]
    assert members.call_each("add", [(1,), (2,)], b=0, **WAIT) == [1, 3]
    assert members.call_one(1, "add", 5, b=0, **WAIT) == 6
    assert members.call("index", **WAIT) == [0, 1], "attributes are read"
    members.ping(**WAIT)


def test_deadline_names_who_is_missing(members: ActorGroup) -> None:
    with pytest.raises(DeadlineExceeded) as caught:
        members.call("sleep_if", 1, 2.0, deadline_s=0.3, setting="deadlines.barrier_s")
    message = str(caught.value)
    assert message.startswith("sleep_if: trainer rank 1 (of 2) did not arrive within 0.3 s")
    assert message.endswith("raise deadlines.barrier_s if they were only slow")
    members.ping(**WAIT)  # the late member has caught up; the group is usable


def test_failure_names_the_member_and_keeps_the_cause(members: ActorGroup) -> None:
    with pytest.raises(RankFailure, match="trainer rank 1: fail_if: KeyError: 'tensor of member 1'") as caught:
        members.call("fail_if", 1, **WAIT)
    assert isinstance(caught.value.__cause__, KeyError)
    assert "fail_if" in "".join(caught.value.__cause__.__notes__), "the member's own traceback travels along"
    with pytest.raises(RankFailure, match=r"AttributeError.*no_such_method"):
        members.call("no_such_method", **WAIT)


def ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_killed_member_is_named_before_the_one_it_pulls_down_and_close_ends_the_rest() -> None:
    group = ActorGroup("trainer rank", [partial(Member, i) for i in range(2)], num_cpus=0.5)
    group.start(deadline_s=120.0, setting="deadlines.ranks_start_s")
    try:
        pids = [pid for _, pid, _ in group.call("where", **WAIT)]
        pending = group.begin_each("fail_after_death_of", [(pids[1],), (os.getpid(),)])
        started = time.monotonic()
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(RankFailure) as caught:
            pending.wait(**WAIT)
        assert time.monotonic() - started < 20
        first, second = str(caught.value).splitlines()
        assert first.startswith("trainer rank 1: fail_after_death_of: MemberDied")
        assert second == "trainer rank 0: connection closed by peer"
    finally:
        group.close()
    group.close()
    deadline = time.monotonic() + 10
    while not ended(pids[0]):
        assert time.monotonic() < deadline, "the process outlives its group"
        time.sleep(0.05)


def test_factory_error_surfaces_at_start() -> None:
    group = ActorGroup("engine", [broken_factory], num_cpus=0.1)
    with pytest.raises(RankFailure, match="engine 0: start: FileNotFoundError: no such model folder"):
        group.start(deadline_s=120.0, setting="deadlines.engine_start_s")
    group.close()


def test_more_than_the_cluster_has_is_refused_with_figures() -> None:
    group = ActorGroup("engine", [broken_factory] * 3, num_cpus=2.0)
    with pytest.raises(PreflightError, match=r"6 CPUs are asked for and 4 exist: 2 short.*3 x engine"):
        group.launch()
    with pytest.raises(PreflightError, match="1 GPUs are asked for and 0 exist"):
        ActorGroup("engine", [broken_factory], num_cpus=1.0, num_gpus=1.0).launch()


def test_busy_cluster_ends_at_the_placement_deadline(members: ActorGroup) -> None:
    waiting = ActorGroup("engine", [partial(Member, 0)], num_cpus=4.0, placement_deadline_s=0.5)
    try:
        with pytest.raises(DeadlineExceeded, match=r"room for 1 x \(4 CPU.*placement_s"):
            waiting.start(deadline_s=60.0, setting="deadlines.engine_start_s")
    finally:
        waiting.close()


def test_forwarding_the_device_mask_is_refused() -> None:
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES"):
        ActorGroup("engine", [broken_factory], num_cpus=1.0, env_vars={"CUDA_VISIBLE_DEVICES": "0"})


def test_a_second_cluster_in_one_process_is_refused() -> None:
    with pytest.raises(RuntimeError, match="already connected"), local_cluster(RuntimeConfig()):
        pass
    assert ray.is_initialized(), "the refusal must not shut the first one down"


# -- trainer group -----------------------------------------------------------------------------------------------------

DEADLINES = DeadlinesConfig(train_s=60.0, generate_s=60.0, weight_sync_s=60.0)


def batch(first: int) -> PackedBatch:
    """One row of 4 positions with 2 trained ones; values depend on `first`, so that a mix-up shows."""
    row = torch.arange(first, first + 4)
    return PackedBatch(
        input_ids=row[None],
        labels=row[None] + 1,
        position_ids=torch.arange(4)[None],
        doc_ids=torch.ones(1, 4, dtype=torch.int64),
        response_mask=torch.tensor([[False, True, True, False]]),
        advantages=torch.full((1, 4), float(first)),
        rollout_logprobs=-row[None].float(),
        sample_ids=((f"e0.p/{first}",),),
    )


def plan(*ranks: tuple[int, ...]) -> StepPlan:
    return StepPlan(
        micro_batches=tuple(tuple(batch(first) for first in rank) for rank in ranks),
        num_samples=sum(map(len, ranks)),
        num_trained_tokens=2 * sum(map(len, ranks)),
        num_real_tokens=4 * sum(map(len, ranks)),
        num_padded_tokens=0,
    )


@pytest.fixture(scope="module")
def trainer() -> Iterator[RayTrainerGroup]:
    group = ActorGroup("trainer rank", [partial(Rank, i) for i in range(2)], num_cpus=0.5)
    group.start(deadline_s=120.0, setting="deadlines.ranks_start_s")
    trainer = RayTrainerGroup(group, name="test", deadlines=DEADLINES, has_reference=True)
    yield trainer
    trainer.close()


def test_each_rank_gets_its_own_micro_batches(trainer: RayTrainerGroup) -> None:
    metrics = trainer.forward_backward(plan((1, 2), (10, 20)), loss_denominator=2.0).values()
    # rank 0: 4 x (1 + 2) = 12 → 6 over 4 tokens; rank 1: 4 x (10 + 20) = 120 → 60 over 4 tokens
    assert metrics == {"loss/policy": (6 + 60) / 8, "tokens": 8.0, "mismatch/abs_max": 1.0}
    logprobs = trainer.logprobs(plan((1, 2), (10, 20)), reference=True)
    assert [[tensor[0, 0].item() for tensor in rank] for rank in logprobs] == [[-2.0, -4.0], [-20.0, -40.0]]
    assert trainer.logprobs(plan((1,), (10,)))[1][0].dtype is torch.float32
    with pytest.raises(ValueError, match="plan for 1 ranks was given to 2"):
        trainer.forward_backward(plan((1,)), loss_denominator=1.0)


def test_global_metrics_are_not_added_up_and_versions_agree(trainer: RayTrainerGroup) -> None:
    before = trainer.policy_version
    assert trainer.optim_step().values() == {"optim/grad_norm": 2.5, "optim/weights_moved": 1.0}
    assert trainer.policy_version == before + 1
    trainer.load(Path("checkpoints/41"))
    assert trainer.policy_version == 41


def test_push_reports_what_rank_0_sent(trainer: RayTrainerGroup) -> None:
    trainer.arrive(deadline_s=30.0, setting="deadlines.barrier_s")
    trainer.connect_weights("client", port=7, deadline_s=10.0, setting="deadlines.weight_sync_s")
    report = trainer.push_weights(5, deadline_s=10.0, setting="deadlines.weight_sync_s")
    assert (report.policy_version, dict(report.checksums)) == (5, {"w0": 1})
    journal = trainer._group.call("journal", **WAIT)
    assert journal[0][-1] == journal[1][-1] == "connect client 7 9", "a rank's own deadline ends before the driver's"


def test_ranks_that_drift_apart_are_noticed(trainer: RayTrainerGroup) -> None:
    trainer.load(Path("checkpoints/3"))
    trainer._group.call("drift", True, **WAIT)
    try:
        with pytest.raises(RankFailure, match=r"different policy versions: \[4, 5\]"):
            trainer.optim_step()
    finally:
        trainer._group.call("drift", False, **WAIT)
        trainer.load(Path("checkpoints/3"))
    without = RayTrainerGroup(trainer._group, name="test", deadlines=DEADLINES, has_reference=False)
    with pytest.raises(ValueError, match="no reference policy"):
        without.logprobs(plan((1,), (2,)), reference=True)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def checkpoint_state(step: int) -> CheckpointState:
    return CheckpointState(run_id="r", steps_done=step, empty_steps=0, policy_version=step, prompts={})


def test_ranks_write_behind_the_next_step(trainer: RayTrainerGroup, tmp_path: Path) -> None:
    paths = RunPaths(run_id="r", run=tmp_path, store=str(tmp_path / "store"))
    trainer.load(Path("checkpoints/7"))
    writer = CheckpointWriter(paths, trainer, loop=LoopConfig())
    writer.begin(checkpoint_state(1))
    trainer.optim_step()
    writer.recorded(1)
    writer.finish()
    writer.close()
    point = newest_complete(paths)
    assert point is not None
    assert sorted(file.name for file in point.path.iterdir()) == [
        "loop.json", "manifest.json", "rank0.safetensors", "rank1.safetensors",
    ]  # fmt: skip
    for rank in range(2):
        assert load_file(point.path / f"rank{rank}.safetensors")["weight/w"].tolist() == [7.0] * 16


def test_a_rank_that_is_killed_while_it_writes_costs_that_checkpoint_only(
    cluster: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = RunPaths(run_id="r", run=tmp_path, store=str(tmp_path / "store"))
    group = ActorGroup("trainer rank", [partial(Rank, i, 0) for i in range(2)], num_cpus=0.5)
    group.start(deadline_s=120.0, setting="deadlines.ranks_start_s")
    trainer = RayTrainerGroup(group, name="test", deadlines=DEADLINES, has_reference=False)
    writer = CheckpointWriter(paths, trainer, loop=LoopConfig())
    writer.begin(checkpoint_state(1))
    writer.recorded(1)
    group.call_one(1, "grow", BIG, **WAIT)
    writer.begin(checkpoint_state(2))
    (partial_folder,) = paths.checkpoints.glob(".partial-*")
    file = partial_folder / "rank1.safetensors"
    while not file.exists():
        time.sleep(0.001)
    os.kill(group.processes["trainer rank 1"], signal.SIGKILL)
    assert (partial_folder / "rank0.safetensors").exists(), "the other rank's part is whole"
    with pytest.raises(RankFailure, match="trainer rank 1: written: MemberDied: the process died"):
        complete(writer, 2)
    writer.close()
    assert [path.name for path in paths.checkpoints.iterdir()] == ["step-000001"]
    with caplog.at_level(logging.WARNING):
        point = newest_complete(paths)
    assert point is not None
    assert point.state.steps_done == 1
    assert not caplog.text, "nothing is damaged: the half-written one was never visible"
    trainer.close()


def test_a_driver_that_is_killed_leaves_nothing_that_counts(tmp_path: Path) -> None:
    """With its ranks still writing; the next attempt removes what they left."""
    code = (
        "import sys; from pathlib import Path; from tests.distributed.test_ray_groups import killed_driver; "
        "killed_driver(Path(sys.argv[1]))"
    )
    driver = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    paths = RunPaths(run_id="r", run=tmp_path, store=str(tmp_path / "store"))
    deadline = time.monotonic() + 60.0
    while not list(paths.checkpoints.glob(".partial-step-000002-*/rank0.safetensors")):
        assert driver.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.001)
    driver.kill()
    driver.wait()
    (left,) = paths.checkpoints.glob(".partial-*")
    assert not (left / "manifest.json").exists()
    point = newest_complete(paths)
    assert point is not None
    assert point.state.steps_done == 1
    CheckpointWriter(paths, FakeTrainer([]), loop=LoopConfig()).close()
    assert [path.name for path in paths.checkpoints.iterdir()] == ["step-000001"]


class OneRank(FakeTrainer):
    """`TrainerGroup` whose one rank is in the driver's process."""

    def __init__(self) -> None:
        super().__init__([])
        self.rank = Rank(0, 0)

    def begin_save(self, path: Path) -> None:
        self.rank.begin_save(path)

    def written(self, *, wait: bool, deadline_s: float | None = None) -> tuple[WrittenFile, ...] | None:
        file = self.rank.written(wait=wait)
        return None if file is None else (file,)


def killed_driver(folder: Path) -> None:
    """In a process of its own: one checkpoint, and another that takes its time."""
    paths = RunPaths(run_id="r", run=folder, store=str(folder / "store"))
    trainer = OneRank()
    writer = CheckpointWriter(paths, trainer, loop=LoopConfig())
    writer.begin(checkpoint_state(1))
    complete(writer, 1)
    trainer.rank.grow(BIG)
    writer.begin(checkpoint_state(2))
    complete(writer, 2)


def complete(writer: CheckpointWriter, step: int) -> None:
    writer.recorded(step)
    writer.finish()


# -- engine group ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fake_engines() -> Iterator[ActorGroup]:
    factories = [partial(Engine, 0), partial(Engine, 1, delay_s=0.3)]
    group = engine_actors(factories, num_cpus=0.5)
    group.start(deadline_s=120.0, setting="deadlines.engine_start_s")
    yield group
    group.close()


@pytest.fixture
def engines(fake_engines: ActorGroup) -> EngineGroup:
    return EngineGroup(fake_engines, deadlines=DEADLINES, workers_per_engine=2)


def request(key: str, prompt: tuple[int, ...], seed: int = 0) -> GenerationRequest:
    sampling = SamplingParams(temperature=1.0, max_tokens=4, stop_token_ids=(1,))
    return GenerationRequest(request_id=key, prompt_token_ids=prompt, sampling=sampling, seed=seed)


def test_requests_spread_by_prompt_and_stream_back(engines: EngineGroup) -> None:
    prompts = [(1, 2), (3, 4, 5), (6,), (7, 8)]
    requests = [request(f"{p}/{k}", prompts[p]) for p in range(4) for k in range(3)]
    arrival: list[float] = []
    started = time.monotonic()
    engine_of: dict[int, set[int]] = {}
    for completion in engines.generate(requests):
        arrival.append(time.monotonic() - started)
        prompt = int(completion.request_id[0])
        engine_of.setdefault(prompt, set()).update(completion.token_ids.tolist())
        assert len(completion.token_ids) == len(prompts[prompt])
    assert len(arrival) == 12
    assert all(len(used) == 1 for used in engine_of.values()), "a group's members share one engine's prefix cache"
    assert sorted(min(used) for used in engine_of.values()) == [0, 0, 1, 1]
    assert arrival[5] < 0.25 < arrival[6], "the fast engine's completions do not wait for the slow one's"


def test_polling_an_idle_group_waits_and_returns_nothing(engines: EngineGroup) -> None:
    started = time.monotonic()
    assert engines.poll(0.1) == []
    assert time.monotonic() - started >= 0.1


def test_deadline_names_the_engine_that_still_holds_requests(engines: EngineGroup) -> None:
    requests = [request("fast", (1,)), request("slow", (2,))]
    with pytest.raises(DeadlineExceeded, match="1 completions of engine 1") as caught:
        list(engines.generate(requests, deadline_s=0.1))
    assert "engine 0" not in str(caught.value)
    while engines._owner:
        engines.poll(1.0)


def test_bad_request_is_refused_by_the_call_that_brought_it(engines: EngineGroup) -> None:
    with pytest.raises(RankFailure, match="engine 0: submit: ValueError: negative seed"):
        engines.submit([request("bad", (1,), seed=-1)])
    while engines._polls:
        engines.poll(0.2)


def test_every_engine_decodes_for_the_canary(engines: EngineGroup) -> None:
    decoded = engines.decode_everywhere([request("a", (1, 2)), request("b", (3,))])
    assert [sorted(c.request_id for c in engine) for engine in decoded] == [["a", "b"], ["a", "b"]]
    assert [{int(c.token_ids[0]) for c in engine} for engine in decoded] == [{0}, {1}]


def test_a_canary_between_rollouts_loses_none_of_them(engines: EngineGroup) -> None:
    engines.submit([request("r0", (1,)), request("r1", (2,))])  # engine 1 takes 0.3 s
    decoded = engines.decode_everywhere([request("canary", (9,))])
    assert [[c.request_id for c in engine] for engine in decoded] == [["canary"], ["canary"]]
    rollouts: set[str] = set()
    while len(rollouts) < 2:
        rollouts |= {c.request_id for c in engines.poll(1.0)}
    assert rollouts == {"r0", "r1"}


def test_scores_come_back_in_order(engines: EngineGroup) -> None:
    scores = engines.score([([9, index, index + 10], 1) for index in range(5)])
    assert [score.tolist() for score in scores] == [[index, index + 10] for index in range(5)]


def test_weight_calls_reach_every_engine_in_vllms_convention(engines: EngineGroup, fake_engines: ActorGroup) -> None:
    marks = [len(journal) for journal in fake_engines.call("journal", **WAIT)]
    client = engines.weight_client()
    assert client.num_receivers == 4
    client.init_weight_transfer_engine({"master_port": 1, "rank_offset": 1, "world_size": 5})
    client.start_weight_update()
    client.update_weights({"names": ["w"]})
    client.finish_weight_update()
    engines.pause()
    engines.resume()
    journals = [j[mark:] for j, mark in zip(fake_engines.call("journal", **WAIT), marks, strict=True)]
    for index, journal in enumerate(journals):
        # two workers each: engine 0 takes ranks 1 and 2, engine 1 takes 3 and 4
        joined = {"init_info": {"master_port": 1, "rank_offset": 1 + 2 * index, "world_size": 5}}
        assert journal == [joined, "start", {"update_info": {"names": ["w"]}}, "finish", "pause", "resume"]
    assert engines.checkpoint_names() == (frozenset({"w"}), frozenset({"w"}))
    assert [dict(receipt.checksums) for receipt in engines.commit_weights(9)] == [{"w": 0}, {"w": 1}]
    assert engines.policy_version == 9
    fake_engines.call_one(1, "set_version", 8, **WAIT)
    with pytest.raises(StalenessError, match=r"\[9, 8\]"):
        _ = engines.policy_version


def test_an_engine_that_could_not_answer_beside_a_poll_is_refused() -> None:
    group = engine_actors([partial(Engine, 0)], num_cpus=0.1, max_concurrency=1)
    with pytest.raises(ValueError, match="max_concurrency >= 3"):
        EngineGroup(group, deadlines=DEADLINES)
