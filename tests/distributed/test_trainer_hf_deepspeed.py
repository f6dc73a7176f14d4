"""What only the DeepSpeed trainer can get wrong: how transformers finds documents, and what ZeRO does on the way.

Functions whose name does not start with `test_` run in the ranks.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grpo_lib.errors import DataError, GrpoError
from grpo_lib.trainers.hf_deepspeed_attention import DocumentGroups
from grpo_lib.types import StateKind
from tests.distributed.gloo_ranks import RankPool
from tests.distributed.trainer_cases import (
    CONFIG,
    PLAN,
    ZERO,
    BackendCase,
    hf_scores,
    largest_difference,
    policy_loss,
    score,
    state_of,
    train,
    weights_of,
)

# --- Documents stay apart -----------------------------------------------------------------------------------------


def build_with_broken_boundaries(rank: int, num_ranks: int, model: Path, how: str) -> str:
    """As if transformers did not hand the boundaries down to attention, or others than it was given."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

    original = Qwen3Model.forward

    def broken(self: Any, **options: Any) -> Any:
        documents = options.pop("documents")
        if how == "one document":
            options["documents"] = DocumentGroups.of(torch.arange(len(documents.restore)))
        return original(self, **options)

    setattr(Qwen3Model, "forward", broken)  # noqa: B010 sabotage
    try:
        ZERO[0].build(rank, num_ranks, model)
    except GrpoError as error:
        return str(error)
    finally:
        setattr(Qwen3Model, "forward", original)  # noqa: B010
    return "built"


@pytest.mark.parametrize(
    ("how", "mention"), [("one document", "cross document boundaries"), ("none", "without document boundaries")]
)
def test_lost_boundaries_fail_at_construction(
    one_rank: RankPool, tiny_models: dict[str, Path], how: str, mention: str
) -> None:
    (message,) = one_rank.run(build_with_broken_boundaries, tiny_models["qwen3"], how)
    assert mention in message


def packed_and_alone(rank: int, num_ranks: int, model: Path) -> float:
    """Largest difference between a packed document's log-probabilities and transformers' own for it alone."""
    return largest_difference(score(ZERO[0].build(rank, num_ranks, model)), hf_scores(model, torch.float32))


def test_a_packed_document_gets_what_transformers_gives_it_alone(
    one_rank: RankPool, tiny_models: dict[str, Path]
) -> None:
    """Only the products of whole rows may round in another order; a mask over the row costs ten times as much."""
    (difference,) = one_rank.run(packed_and_alone, tiny_models["qwen3"])
    assert difference <= 1e-6


def build_with_dropout(rank: int, num_ranks: int, model: Path) -> str:
    with pytest.raises(DataError) as caught:
        ZERO[0].build(rank, num_ranks, model)
    return str(caught.value)


def test_a_model_that_draws_random_numbers_is_refused(
    one_rank: RankPool, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(tiny_models["llama"], tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.1}))
    (message,) = one_rank.run(build_with_dropout, tmp_path / "model")
    assert message == "config.json: attention_dropout (0.1) must be 0 for the hf_deepspeed trainer"


# --- ZeRO ---------------------------------------------------------------------------------------------------------


def train_some_steps(rank: int, num_ranks: int, case: BackendCase, model: Path) -> list[dict[str, float]]:
    return train(case.build(rank, num_ranks, model), rank, PLAN, 2)


def test_zero_1_steps_as_zero_2(two_ranks: RankPool, tiny_models: dict[str, Path]) -> None:
    one, two = (two_ranks.run(train_some_steps, case, tiny_models["qwen3_tied"])[0] for case in ZERO[1:3])
    for step, other in zip(one, two, strict=True):
        assert step == pytest.approx(other, rel=1e-6)


def look_at_buffers(rank: int, num_ranks: int, case: BackendCase, model: Path) -> dict[str, np.ndarray]:
    trainer: Any = case.build(rank, num_ranks, model, dtype="bfloat16")
    assert {buffer.dtype for buffer in trainer._model.buffers()} == {torch.float32}
    return score(trainer)


def test_zero_3_computes_in_bf16_what_zero_2_does(one_rank: RankPool, tiny_models: dict[str, Path]) -> None:
    """Left to itself `zero.Init` rounds the rotary embedding's frequencies, by 3e-2 nats here and more further out."""
    (two,) = one_rank.run(look_at_buffers, ZERO[2], tiny_models["qwen3"])
    (three,) = one_rank.run(look_at_buffers, ZERO[3], tiny_models["qwen3"])
    assert largest_difference(two, three) == 0


def build_a_model_beside(rank: int, num_ranks: int, model: Path) -> tuple[str, float]:
    """A device context has its effect after ZeRO-3 built a model: transformers loads models under one."""
    from transformers import AutoModelForCausalLM

    ZERO[3].build(rank, num_ranks, model)
    with torch.device("meta"):
        device = torch.zeros(1).device.type
    return device, float(AutoModelForCausalLM.from_pretrained(model).model.rotary_emb.inv_freq[0])


def test_zero_3_leaves_the_process_as_it_was(tiny_models: dict[str, Path]) -> None:
    """In ranks of its own: what a device context redirects is fixed at its first use in a process."""
    pool = RankPool(1)
    try:
        assert pool.run(build_a_model_beside, tiny_models["qwen3"]) == [("meta", 1.0)]
    finally:
        pool.close()


def keep_small_weights_gathered(rank: int, num_ranks: int, model: Path) -> tuple[int, float, float]:
    """ZeRO-3 never shards small parameters again; a load must reach those copies too."""
    trainer: Any = ZERO[3].build(rank, num_ranks, model)
    num_kept = len(trainer._engine.optimizer.persistent_parameters)
    before = score(trainer)
    weights = state_of(trainer, StateKind.WEIGHT)
    weights["model.norm.weight"] *= 2
    trainer.load_state(StateKind.WEIGHT, lambda name: torch.from_numpy(weights[name]))
    return num_kept, largest_difference(score(trainer), before), largest_difference(weights_of(trainer), weights)


def test_loading_reaches_the_weights_that_zero_3_keeps_whole(two_ranks: RankPool, tiny_models: dict[str, Path]) -> None:
    for num_kept, change, apart in two_ranks.run(keep_small_weights_gathered, tiny_models["qwen3"]):
        assert num_kept > 0
        assert change > 0.1
        assert apart == 0


def train_with_unequal_chunks(rank: int, num_ranks: int, model: Path) -> tuple[int, dict[str, float]]:
    """The head's chunks on this rank, and a step."""
    trainer = ZERO[3].build(rank, num_ranks, model, config=CONFIG.model_copy(update={"logprob_chunk_tokens": 1}))
    batches = PLAN.micro_batches[rank]
    trainer.forward_backward(batches, policy_loss(), loss_denominator=float(PLAN.num_trained_tokens))
    return sum(batch.num_trained_tokens for batch in batches), trainer.optim_step().values()


def test_ranks_may_have_different_numbers_of_chunks_under_zero_3(
    two_ranks: RankPool, tiny_models: dict[str, Path]
) -> None:
    (first, step), (second, other) = two_ranks.run(train_with_unequal_chunks, tiny_models["llama"])
    assert first != second
    assert step == other


def test_no_operator_is_compiled(tmp_path: Path, tiny_models: dict[str, Path]) -> None:
    """A build would take minutes and, killed, leave a lock that hangs every later run."""
    program = (
        "import os, sys; from pathlib import Path; from tests.distributed.trainer_cases import ZERO\n"
        "ZERO[2].build(0, 1, Path(sys.argv[1]))\n"
        "print('built', os.listdir(sys.argv[2]))"
    )
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    command = [sys.executable, "-c", program, str(tiny_models["qwen3"]), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "built []"
