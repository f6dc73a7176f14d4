"""One vLLM engine and one trainer on the same GPU, with pushes through CUDA IPC and the sabotage that must be noticed.

The trainer lives in this process, the engine in a Ray actor, as in a run with `weight_sync.backend=ipc`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grpo_lib.config import DeadlinesConfig, RunConfig, WeightSyncConfig, resolve
from grpo_lib.ray_runtime.actor_group import ActorGroup
from grpo_lib.ray_runtime.cluster import local_cluster
from grpo_lib.ray_runtime.engine_group import EngineGroup, engine_actors
from grpo_lib.stages.live import engine_factory
from grpo_lib.types import Completion, GenerationRequest, SamplingParams, SenderReport, VersionSpan
from grpo_lib.weight_sync.canary import DecodeCanary
from grpo_lib.weight_sync.sender import WeightSender, open_backend
from grpo_lib.weight_sync.sync import CertifiedWeightSync
from tests.distributed.engine_parts import STOP, BreakableEngine, HfTrainer, request, tiny_qwen3

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHARE = 0.1
BF16 = 0.15  # nats between two correct bfloat16 implementations of this model; a damaged one is off by more than 0.5
DEADLINES = DeadlinesConfig(generate_s=120.0, weight_sync_s=60.0, engine_start_s=280.0)
WAIT = {"deadline_s": 120.0, "setting": "deadlines.generate_s"}
PROMPTS = tuple(tuple(range(10 + 5 * p, 18 + 6 * p)) for p in range(4))
LONG_PROMPT = tuple(range(20, 90))  # four full cache blocks
OPTIONS = (
    "model.dtype=bfloat16", "weight_sync.backend=ipc", f"weight_sync.canary_tolerance={BF16}", "parity.max_abs=1",
    "trainer.num_ranks=1", "runtime.gpus_per_rank=0.5", "runtime.gpus_per_engine=0.5", "data.max_prompt_tokens=100",
    "rollout.max_tokens=28", "rollout.max_num_seqs=16", f"rollout.gpu_memory_share={SHARE}",
    "rollout.sleep_while_training=true",
)  # fmt: skip


class CudaTrainer(HfTrainer):
    """The same on the GPU, in bfloat16."""

    def __init__(self, model: Any) -> None:
        super().__init__(model.to("cuda", torch.bfloat16))

    def change(self, seed: int) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                noise = torch.randn(parameter.shape, generator=generator, device="cuda")
                parameter.add_((0.02 * noise).to(parameter.dtype))
        self.policy_version += 1

    def score(
        self, pairs: Sequence[tuple[tuple[int, ...], np.ndarray]], temperature: float = 1.0, top_k: int = 0
    ) -> list[np.ndarray]:
        assert (temperature, top_k) == (1.0, 0)
        scores: list[np.ndarray] = []
        for prompt, response in pairs:
            ids = torch.tensor([[*prompt, *response.tolist()]], device="cuda")
            with torch.no_grad():
                hidden = self.model.model(ids, use_cache=False).last_hidden_state[0, len(prompt) - 1 : -1]
                logits = hidden.float() @ self.model.lm_head.weight.float().t()  # as model.fp32_head has it
            picked = logits.log_softmax(-1).gather(-1, torch.tensor(response, device="cuda")[:, None])
            scores.append(picked[:, 0].cpu().numpy())
        return scores


@dataclass
class LocalRank:
    """A trainer of one rank in this process."""

    trainer: HfTrainer
    open_channel: Callable[..., Any] | None = None
    sender: WeightSender = field(init=False)

    def __post_init__(self) -> None:
        trainer: Any = self.trainer
        self.sender = WeightSender(trainer, backend="ipc", rank=0, open_channel=self.open_channel)

    def arrive(self, *, deadline_s: float, setting: str) -> None:
        del deadline_s, setting

    def connect_weights(self, client: Any, *, port: int, deadline_s: float, setting: str) -> None:
        self.sender.connect(client, port=port, timeout_s=deadline_s)

    def push_weights(self, policy_version: int, *, deadline_s: float, setting: str) -> SenderReport:
        report = self.sender.push(policy_version)
        torch.cuda.synchronize()
        return report


@dataclass
class Stack:
    config: RunConfig
    actors: ActorGroup
    engines: EngineGroup
    trainer: CudaTrainer

    def sync(self, open_channel: Callable[..., Any] | None = None) -> CertifiedWeightSync:
        canary = DecodeCanary(
            prompts=PROMPTS,
            sampling=SamplingParams(temperature=1.0, max_tokens=12, stop_token_ids=STOP),
            decode=self.engines.decode_everywhere,
            score=self.trainer.score,
            tolerance=BF16,
        )
        sync = CertifiedWeightSync(
            ranks=LocalRank(self.trainer, open_channel),
            engines=self.engines,
            config=WeightSyncConfig(backend="ipc", canary_every=1, canary_tolerance=BF16),
            deadlines=DEADLINES,
            canary=canary,
        )
        sync.connect()
        return sync

    def one(self, method: str, *args: Any) -> Any:
        return self.actors.call_one(0, method, *args, **WAIT)

    def generate(self, *requests: GenerationRequest) -> dict[str, Completion]:
        return {completion.request_id: completion for completion in self.engines.generate(requests)}

    def worst(self, requests: Sequence[GenerationRequest], done: dict[str, Completion]) -> float:
        """Largest |engine - trainer| log-probability."""
        scores = self.trainer.score([(r.prompt_token_ids, done[r.request_id].token_ids) for r in requests])
        return max(float(np.abs(done[r.request_id].logprobs - s).max()) for r, s in zip(requests, scores, strict=True))


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder: Path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_qwen3(seed=0).to(torch.bfloat16).save_pretrained(folder)
    config = resolve("embedded_addition", OPTIONS)
    factory = engine_factory(config, folder, policy_version=0, index=0)
    assert isinstance(factory, partial)
    with pytest.MonkeyPatch.context() as patch, local_cluster(config.runtime):
        # Handles travel as objects through Ray, so that nothing has to be unpickled from text.
        patch.delenv("VLLM_ALLOW_INSECURE_SERIALIZATION", raising=False)
        actors = engine_actors(
            [partial(BreakableEngine, **factory.keywords)],
            num_cpus=1.0,
            num_gpus=0.5,
            env_vars={"VLLM_ALLOW_INSECURE_SERIALIZATION": "0"},
            placement_deadline_s=60.0,
        )
        try:
            actors.launch()
            actors.wait_ready(deadline_s=DEADLINES.engine_start_s, setting="deadlines.engine_start_s")
            engines = EngineGroup(actors, deadlines=DEADLINES)
            yield Stack(config, actors, engines, CudaTrainer(tiny_qwen3(seed=1)))
        finally:
            actors.close()


def test_a_push_is_certified_and_decoded_from(stack: Stack) -> None:
    sync = stack.sync()
    for seed in (3, 4):
        stack.trainer.change(seed)
        certificate = sync.push(stack.trainer.policy_version)
        assert certificate.ok, certificate
        assert certificate.num_tensors == len(stack.trainer.manifest().entries)
        assert certificate.canary is not None
        assert certificate.canary.num_tokens > 4
    requests = [request(f"p{i}", prompt, seed=i, max_tokens=20) for i, prompt in enumerate(PROMPTS)]
    assert stack.worst(requests, stack.generate(*requests)) < BF16


def test_a_withheld_root_tensor_is_named_and_the_engine_stays_closed(stack: Stack) -> None:
    sync = stack.sync()
    stack.trainer.left_out = frozenset({"model.norm.weight"})
    try:
        certificate = sync.push(stack.trainer.policy_version)
    finally:
        stack.trainer.left_out = frozenset()
    assert not certificate.ok
    assert certificate.missing == ("model.norm.weight",)
    assert "model.norm.weight" in certificate.unloaded
    assert "is paused; submit is legal only while running" in stack.one("attempt", "submit", [request("x", (5,), 0)])
    assert sync.push(stack.trainer.policy_version).ok


def test_a_flipped_bit_is_named(stack: Stack) -> None:
    name = "model.layers.1.mlp.down_proj.weight"

    def flipping(*, weights: Any, **options: Any) -> Any:
        class Flipped:
            def manifest(self) -> Any:
                return weights.manifest()

            def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
                for key, tensor in weights:
                    if key == name:
                        tensor = tensor.clone()
                        tensor.view(torch.int16).view(-1)[7] ^= 1
                    yield key, tensor

        flipped: Any = Flipped()
        return open_backend(weights=flipped, **options)

    certificate = stack.sync(flipping).push(stack.trainer.policy_version)
    assert certificate.mismatched == (name,)
    assert stack.sync().push(stack.trainer.policy_version).ok


def test_weights_damaged_after_the_transfer_are_heard(stack: Stack) -> None:
    """NeMo-RL 2895: what arrived was right, what decodes is not; only the canary can tell, and it listens to decode."""
    sync = stack.sync()
    assert sync.push(stack.trainer.policy_version).ok
    for _ in range(8):
        stack.one("damage_decoding")
    requests = [request(f"d{i}", prompt, seed=i, max_tokens=12) for i, prompt in enumerate(PROMPTS)]
    damaged = stack.worst(requests, stack.generate(*requests))
    assert damaged > BF16, "the canary would not hear this damage"
    assert sync.push(stack.trainer.policy_version).ok, "a push mends it"


def test_no_token_has_two_versions_although_a_step_is_under_way_at_the_pause(stack: Stack) -> None:
    sync = stack.sync()
    assert sync.push(stack.trainer.policy_version).ok
    old_version = stack.trainer.policy_version
    requests = [request(f"v{i}", prompt, seed=i, max_tokens=110, stop_token_ids=()) for i, prompt in enumerate(PROMPTS)]
    stack.engines.submit(requests)
    while min(stack.one("progress").values()) < 5:
        pass
    stack.engines.pause()
    first = stack.one("progress")
    assert all(5 <= tokens < 110 for tokens in first.values())
    assert stack.one("progress") == first, "a token arrived while the engine was paused"
    old = CudaTrainer(copy.deepcopy(stack.trainer.model))
    for seed in range(60, 66):
        stack.trainer.change(seed)
    stack.trainer.policy_version = old_version + 1
    assert sync.push(old_version + 1).ok
    done: dict[str, Completion] = {}
    while len(done) < len(requests):
        done |= {completion.request_id: completion for completion in stack.engines.poll(1.0)}
    heard = 0.0
    for r in requests:
        completion, cut = done[r.request_id], first[r.request_id]
        assert completion.version_spans == (
            VersionSpan(version=old_version, start=0, stop=cut),
            VersionSpan(version=old_version + 1, start=cut, stop=110),
        )
        pair = [(r.prompt_token_ids, completion.token_ids)]
        by_old, by_new = old.score(pair)[0], stack.trainer.score(pair)[0]
        assert np.abs(completion.logprobs[:cut] - by_old[:cut]).max() < BF16
        assert np.abs(completion.logprobs[cut:] - by_new[cut:]).max() < BF16
        heard = max(heard, float(np.abs(by_old - by_new)[cut : cut + 2].max()))
    assert heard > BF16, "the two versions agree about the tokens at the cut, which proves nothing"


def test_a_push_drops_what_the_prefix_cache_knew(stack: Stack) -> None:
    sync = stack.sync()
    assert sync.push(stack.trainer.policy_version).ok
    before = request("before", LONG_PROMPT, seed=0, max_tokens=8)
    stack.generate(before)
    for seed in range(30, 36):
        stack.trainer.change(seed)
    assert sync.push(stack.trainer.policy_version).ok
    after = request("after", LONG_PROMPT, seed=0, max_tokens=8)
    assert stack.worst([after], stack.generate(after)) < BF16
    stack.one("keep_prefix_cache", True)
    try:
        for seed in range(40, 46):
            stack.trainer.change(seed)
        sync.push(stack.trainer.policy_version)
        stale = request("stale", LONG_PROMPT, seed=0, max_tokens=8)
        assert stack.worst([stale], stack.generate(stale)) > BF16, "old keys and values go unnoticed"
    finally:
        stack.one("keep_prefix_cache", False)
    assert sync.push(stack.trainer.policy_version).ok


def test_a_sleeping_engine_gives_its_memory_back_and_wakes_to_a_push_only(stack: Stack) -> None:
    sync = stack.sync()
    assert sync.push(stack.trainer.policy_version).ok
    requests = [request(f"s{i}", prompt, seed=i, max_tokens=20) for i, prompt in enumerate(PROMPTS)]
    before = stack.generate(*requests)
    free_awake, total = torch.cuda.mem_get_info()
    sync.release()
    free_asleep, _ = torch.cuda.mem_get_info()
    # The cache is nearly all of the share: the model is tiny, and what else it takes is an upper estimate.
    assert free_asleep - free_awake > 0.5 * SHARE * total
    assert "is asleep; resume is legal only while paused" in stack.one("attempt", "resume")
    assert "is asleep; submit is legal only while running" in stack.one("attempt", "submit", [request("x", (5,), 0)])
    certificate = sync.push(stack.trainer.policy_version)
    assert certificate.ok, certificate
    after = stack.generate(*requests)
    for key, completion in before.items():
        np.testing.assert_array_equal(after[key].token_ids, completion.token_ids)
        np.testing.assert_array_equal(after[key].logprobs, completion.logprobs)
    free_again, _ = torch.cuda.mem_get_info()
    assert abs(free_again - free_awake) < 0.01 * total


def test_a_woken_engine_serves_nothing_before_a_push(stack: Stack) -> None:
    sync = stack.sync()
    stack.engines.pause()
    stack.engines.sleep()
    stack.engines.wake()
    assert "is awake; resume is legal only while paused" in stack.one("attempt", "resume")
    assert "is awake; submit is legal only while running" in stack.one("attempt", "submit", [request("x", (5,), 0)])
    stack.one("start_weight_update")
    assert "is updating" in stack.one("attempt", "resume")
    # An update that brings nothing must not be committed as one: start anew from a state that a push accepts.
    stack.one("finish_weight_update")
    (receipt,) = stack.engines.commit_weights(0)
    assert "model.norm.weight" in receipt.unloaded
    assert sync.push(stack.trainer.policy_version).ok


def test_nights_in_a_row(stack: Stack) -> None:
    """As in a run: release, train, push, and the memory comes and goes without growing."""
    sync = stack.sync()
    free: list[int] = []
    for seed in range(50, 54):
        sync.release()
        stack.trainer.change(seed)
        assert sync.push(stack.trainer.policy_version).ok
        free.append(torch.cuda.mem_get_info()[0])
    assert free[-1] > free[0] - (64 << 20)


def test_an_engine_stays_within_its_share(stack: Stack) -> None:
    """The card's use without this process', whose CUDA context is the one gibibyte allowed; nobody else is on it."""
    free, total = torch.cuda.mem_get_info()
    granted, used = SHARE * total, total - free - torch.cuda.memory_reserved()
    assert 0.5 * granted < used < granted + 2**30, f"{used / 2**30:.2f} GiB of {granted / 2**30:.2f} GiB granted"
