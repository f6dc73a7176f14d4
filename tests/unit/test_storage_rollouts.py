from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_lib.algo.advantages import GroupAssessment
from grpo_lib.errors import StorageError
from grpo_lib.storage.local import LocalStore
from grpo_lib.storage.rollouts import content_digest, read_rollouts, write_rollouts
from grpo_lib.types import (
    Completion,
    FinishReason,
    GroupStatus,
    Prompt,
    Rollout,
    RolloutGroup,
    Verdict,
    VerdictReason,
    VerdictState,
    VersionSpan,
)

VERDICTS = (
    Verdict(state=VerdictState.VALID, reward=1.0, reason=VerdictReason.CORRECT, extracted="7", elapsed_ms=0.25),
    Verdict(state=VerdictState.ZERO, reward=0.0, reason=VerdictReason.NO_ANSWER),
    Verdict(state=VerdictState.FAILED, reward=0.0, reason=VerdictReason.TIMEOUT, extracted="verifier took too long"),
)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def completion(rng: np.random.Generator, name: str, length: int) -> Completion:
    """Log-probabilities are random bit patterns of negative floats: denormals, huge values, all of float32."""
    bits = rng.integers(0x80000001, 0xFF800000, size=length, dtype=np.uint32)
    cut = length // 2
    spans = [(3, 0, cut), (4, cut, length)] if cut else [(4, 0, length)] if length else []
    return Completion(
        request_id=name,
        token_ids=rng.integers(0, 150_000, size=length, dtype=np.int64),
        logprobs=bits.view(np.float32),
        version_spans=tuple(VersionSpan(version=v, start=a, stop=b) for v, a, b in spans),
        finish_reason=list(FinishReason)[length % 3],
        seed=int(rng.integers(0, 2**63 - 1)),
        latency_s=float(rng.random()),
    )


def make_step(seed: int, num_groups: int = 3) -> tuple[list[RolloutGroup], list[GroupAssessment]]:
    rng = np.random.default_rng(seed)
    groups, assessments = [], []
    for number in range(num_groups):
        name = f"e2.sums-train-{number:06d}"
        rollouts = tuple(
            Rollout(
                sample_index=index,
                completion=completion(rng, f"{name}/{index}", length),
                text=f"ß\n\x00{length}",
                verdict=VERDICTS[index % 3],
            )
            for index, length in enumerate(rng.permutation([0, 1, 2, 9]).tolist())
        )
        prompt = Prompt(
            prompt_id=f"sums-train-{number:06d}",
            text="<|user|>3+4=",
            token_ids=(3, *range(number + 1)),
            answer="7",
            dataset="sums",
            verifier="integer",
        )
        groups.append(RolloutGroup(group_id=name, prompt=prompt, rollouts=rollouts))
        assessments.append(
            GroupAssessment(
                status=list(GroupStatus)[number], advantages=rng.standard_normal(4), usable=rng.random(4) < 0.5
            )
        )
    return groups, assessments


def assert_same(group: RolloutGroup, other: RolloutGroup) -> None:
    assert (group.group_id, group.prompt) == (other.group_id, other.prompt)
    assert len(group.rollouts) == len(other.rollouts)
    for mine, theirs in zip(group.rollouts, other.rollouts, strict=True):
        assert (mine.sample_index, mine.text, mine.verdict) == (theirs.sample_index, theirs.text, theirs.verdict)
        for name in ("request_id", "version_spans", "finish_reason", "seed", "latency_s"):
            assert getattr(mine.completion, name) == getattr(theirs.completion, name)
        assert mine.completion.token_ids.tolist() == theirs.completion.token_ids.tolist()
        assert mine.completion.logprobs.tobytes() == theirs.completion.logprobs.tobytes()


def test_round_trip_is_exact_to_the_bit(store: LocalStore) -> None:
    groups, assessments = make_step(seed=0)
    ref = write_rollouts(store, step=12, groups=groups, assessments=assessments)
    stored = read_rollouts(store, ref)
    assert stored.step == 12
    for group, other in zip(groups, stored.groups, strict=True):
        assert_same(group, other)
    for mine, theirs in zip(assessments, stored.assessments, strict=True):
        assert mine.status is theirs.status
        assert mine.advantages.tobytes() == theirs.advantages.tobytes()
        assert mine.usable.tolist() == theirs.usable.tolist()
    assert stored.content_digest == content_digest(groups, assessments)


def test_comparison_notices_one_changed_bit() -> None:
    (group, *_), _ = make_step(seed=0)
    index = next(i for i, rollout in enumerate(group.rollouts) if len(rollout.completion.logprobs) == 9)
    rollout = group.rollouts[index]
    logprobs = rollout.completion.logprobs.copy()
    logprobs.view(np.uint32)[4] ^= 1
    changed = replace(rollout, completion=replace(rollout.completion, logprobs=logprobs))
    rollouts = (*group.rollouts[:index], changed, *group.rollouts[index + 1 :])
    with pytest.raises(AssertionError):
        assert_same(group, replace(group, rollouts=rollouts))


def with_first_rollout(groups: list[RolloutGroup], **changes: object) -> list[RolloutGroup]:
    """The step with another first rollout; `completion` and `verdict` are dictionaries of changes."""
    first = groups[0].rollouts[0]
    nested = {
        name: replace(getattr(first, name), **changes.pop(name))  # type: ignore[arg-type]
        for name in ("completion", "verdict")
        if name in changes
    }
    rollouts = (replace(first, **nested, **changes), *groups[0].rollouts[1:])  # type: ignore[arg-type]
    return [replace(groups[0], rollouts=rollouts), *groups[1:]]


def test_content_digest_ignores_timings_and_nothing_else(store: LocalStore) -> None:
    groups, assessments = make_step(seed=1)
    digest = content_digest(groups, assessments)
    slower = with_first_rollout(groups, completion={"latency_s": 9.0}, verdict={"elapsed_ms": 9.0})
    assert content_digest(slower, assessments) == digest
    refs = {write_rollouts(store, step=1, groups=g, assessments=assessments).key for g in (groups, slower)}
    assert len(refs) == 2  # the file does hold the timings

    first = groups[0].rollouts[0].completion
    longer = {
        "token_ids": np.append(first.token_ids, 5),
        "logprobs": np.append(first.logprobs, np.float32(-1)),
        "version_spans": (VersionSpan(version=9, start=0, stop=len(first.token_ids) + 1),),
    }
    changed = [
        with_first_rollout(groups, text="other"),
        with_first_rollout(groups, completion={"seed": 1}),
        with_first_rollout(groups, completion={"finish_reason": FinishReason.ABORT, "seed": 2}),
        with_first_rollout(groups, completion=longer),
        with_first_rollout(groups, verdict={"reward": 0.5}),
        with_first_rollout(groups, verdict={"extracted": "8"}),
        [replace(groups[0], prompt=replace(groups[0].prompt, token_ids=(1,))), *groups[1:]],
        groups[::-1],
    ]
    digests = {content_digest(g, assessments) for g in changed}
    digests.add(content_digest(groups, [replace(assessments[0], advantages=np.zeros(4)), *assessments[1:]]))
    assert len(digests | {digest}) == len(changed) + 2


def test_damaged_and_foreign_files_are_refused(store: LocalStore, tmp_path: Path) -> None:
    groups, assessments = make_step(seed=2)
    ref = write_rollouts(store, step=1, groups=groups, assessments=assessments)
    with pytest.raises(StorageError, match="not a rollout table of format 2"):
        read_rollouts(store, store.put_table(pa.table({"x": [1]})))
    table = pq.read_table(store.get(ref))
    other_format = table.replace_schema_metadata({**table.schema.metadata, b"format": b"1"})
    with pytest.raises(StorageError, match="not a rollout table of format 2"):
        read_rollouts(store, store.put_table(other_format))
    (tmp_path / "text").write_text("no table")
    with pytest.raises(StorageError, match="not readable Parquet"):
        read_rollouts(store, store.put_file(tmp_path / "text"))
    path = store.get(ref)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(raw)
    with pytest.raises(StorageError, match="damaged after storing"):
        read_rollouts(store, ref)


def test_groups_need_ids_and_assessments_of_their_own(store: LocalStore) -> None:
    groups, assessments = make_step(seed=3)
    with pytest.raises(ValueError, match="3 rollout groups with 3 ids and 2 assessments"):
        write_rollouts(store, step=1, groups=groups, assessments=assessments[:2])
    with pytest.raises(ValueError, match="2 rollout groups with 1 ids"):
        write_rollouts(store, step=1, groups=[groups[0], groups[0]], assessments=assessments[:2])
