"""A tiny model, a trainer around its Hugging Face form, and engines that can be damaged on request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from grpo_lib.config import RolloutConfig
from grpo_lib.data.models import resolve_model_path
from grpo_lib.rollout.vllm_engine import VllmEngine
from grpo_lib.types import Bucket, GenerationRequest, SamplingParams, SenderReport, WeightEntry, WeightManifest
from grpo_lib.weight_sync.gloo_channel import GlooSender, WireTensor
from grpo_lib.weight_sync.sender import EngineClient, OpenChannel, WeightSender

SHIPPED = resolve_model_path("builtin:tiny_qwen3")
VOCAB = 264
MAX_MODEL_LEN = 128
STOP = (1, 2)


def tiny_qwen3(seed: int) -> Any:
    """A random model in the shape of the shipped one: Qwen3 with tied embeddings. Norms are not 1 and weights larger
    than fresh ones, so that its predictions are far from uniform and react to every weight."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = Qwen3ForCausalLM(Qwen3Config.from_pretrained(SHIPPED)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.08 * noise if parameter.ndim > 1 else 1 + 0.1 * noise)
    return model


@dataclass
class HfTrainer:
    """What a weight push needs of a trainer, around a Hugging Face model; `left_out` is a bug to be noticed."""

    model: Any
    policy_version: int = 0
    left_out: frozenset[str] = field(default_factory=frozenset)

    def _tensors(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, p.detach()) for name, p in self.model.named_parameters() if name not in self.left_out]

    def manifest(self) -> WeightManifest:
        return WeightManifest(
            entries=tuple(
                WeightEntry(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
                for name, tensor in self._tensors()
            )
        )

    def named_weights(self) -> Iterator[Bucket]:
        tensors = self._tensors()
        for start in range(0, len(tensors), 5):
            yield Bucket(tensors=tuple(tensors[start : start + 5]))

    def change(self, seed: int) -> None:
        """One step of an optimiser, as far as the engines can tell."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
        self.policy_version += 1

    def score(
        self, pairs: Sequence[tuple[tuple[int, ...], np.ndarray]], temperature: float = 1.0, top_k: int = 0
    ) -> list[np.ndarray]:
        """Log-probability of each response token in closed form from the model's logits."""
        scores: list[np.ndarray] = []
        for prompt, response in pairs:
            ids = torch.tensor([[*prompt, *response.tolist()]])
            with torch.no_grad():
                logits = self.model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float() / temperature
            if top_k:
                kept = logits.topk(top_k).values[:, -1:]
                logits = logits.masked_fill(logits < kept, -torch.inf)
            picked = logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])
            scores.append(picked[:, 0].numpy())
        return scores

    def argmax(self, prompt: tuple[int, ...], response: np.ndarray) -> np.ndarray:
        """What greedy decoding must have picked at each position of the response."""
        ids = torch.tensor([[*prompt, *response.tolist()]])
        with torch.no_grad():
            return self.model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].argmax(-1).numpy()


@dataclass
class LocalRank:
    """A trainer of one rank in this process."""

    trainer: HfTrainer
    open_channel: OpenChannel | None = None

    def __post_init__(self) -> None:
        trainer: Any = self.trainer  # has what a sender needs of a trainer, and no more
        self.sender = WeightSender(trainer, backend="cpu_gloo", rank=0, open_channel=self.open_channel)

    def arrive(self, *, deadline_s: float, setting: str) -> None:
        del deadline_s, setting

    def connect_weights(self, client: EngineClient, *, port: int, deadline_s: float, setting: str) -> None:
        self.sender.connect(client, port=port, timeout_s=deadline_s)

    def push_weights(self, policy_version: int, *, deadline_s: float, setting: str) -> SenderReport:
        return self.sender.push(policy_version)


class BreakableEngine(VllmEngine):
    """An engine with the bugs that a certificate, a canary or a caller has to notice."""

    def damage_decoding(self) -> None:
        """Change a weight in the running model, after what was received has been checked."""

        def damage(model: torch.nn.Module) -> None:
            dict(model.named_parameters())["model.norm.weight"].data.mul_(1.05)

        self._loop.call(lambda: self._vllm.llm.apply_model(damage))

    def keep_prefix_cache(self, keep: bool) -> None:
        """Leave the cache alone at the next weight updates, but say that it was dropped."""
        if keep:
            setattr(self._vllm.llm, "reset_prefix_cache", lambda **_: True)  # noqa: B010 - an instance attribute
        else:
            delattr(self._vllm.llm, "reset_prefix_cache")

    def load_layerwise(self, always: bool) -> None:
        """Over `ipc`, load the general way even where the model could be filled in place."""
        from grpo_lib.weight_sync import ipc_transfer

        self._filled_in_place = getattr(self, "_filled_in_place", ipc_transfer.is_filled_in_place)
        ipc_transfer.is_filled_in_place = (lambda model: False) if always else self._filled_in_place

    def break_step(self) -> None:
        def step() -> None:
            raise MemoryError("no block left")

        setattr(self._vllm, "step", step)  # noqa: B010 - an instance attribute

    def progress(self) -> dict[str, int]:
        """Tokens so far by request in flight."""
        return self._loop.call(
            lambda: {f.request.request_id: len(generated.token_ids) for f, generated in self._progress()}
        )

    def attempt(self, method: str, *args: Any) -> str:
        """The refusal of an illegal call; an empty text if it was allowed."""
        try:
            getattr(self, method)(*args)
        except RuntimeError as error:
            return str(error)
        return ""


@dataclass(frozen=True)
class EngineFactory:
    path: Path
    name: str
    temperature: float

    def __call__(self) -> BreakableEngine:
        return BreakableEngine(
            model_path=self.path,
            config=RolloutConfig(temperature=self.temperature, max_num_seqs=64, kv_cache_mib=64),
            dtype="float32",
            transfer_backend="cpu_gloo",
            max_model_len=MAX_MODEL_LEN,
            threads=1,
            name=self.name,
        )


def request(key: str, prompt: tuple[int, ...], seed: int, **sampling: Any) -> GenerationRequest:
    params = {"temperature": 1.0, "max_tokens": 6, "stop_token_ids": STOP} | sampling
    return GenerationRequest(request_id=key, prompt_token_ids=prompt, sampling=SamplingParams(**params), seed=seed)


def flipping(name: str) -> Callable[..., GlooSender]:
    """A channel that flips one bit of one tensor after its checksum was taken, as a faulty wire does."""

    def open_channel(*, client: Any, weights: Any, port: int, timeout_s: float, **_: Any) -> GlooSender:
        class Flipped:
            def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
                for key, tensor in weights:
                    if key == name:
                        tensor = tensor.clone()
                        tensor.view(torch.int32).view(-1)[7] ^= 1
                    yield key, tensor

        return GlooSender(
            client=client,
            announced=lambda: [WireTensor.parse(e.name, e.dtype, e.shape) for e in weights.manifest().entries],
            weights=Flipped(),
            address=client.sender_address(),
            port=port,
            num_receivers=client.num_receivers,
            timeout_s=timeout_s,
        )

    return open_channel
