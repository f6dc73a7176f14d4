"""What a verifier is made of, and the verdicts that all of them share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from grpo_lib.interfaces import Verifier
from grpo_lib.types import Verdict, VerdictReason, VerdictState

MAX_EXTRACTED_CHARS = 80  # of what a verdict keeps for people; the comparison sees all of it

VerifierFactory = Callable[[float], Verifier]  # from the reward of a correct answer


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierSpec:
    """One way of judging.

    `build` and `accepts_answer` are module-level functions: worker processes import them by name.
    """

    name: str
    build: VerifierFactory
    accepts_answer: Callable[[str], bool]  # whether any completion could be right against this reference answer


def judged(*, correct: bool, correct_reward: float, extracted: str) -> Verdict:
    """A verdict on an answer that was found."""
    return Verdict(
        state=VerdictState.VALID,
        reward=correct_reward if correct else 0.0,
        reason=VerdictReason.CORRECT if correct else VerdictReason.WRONG,
        extracted=shown(extracted),
    )


def no_answer() -> Verdict:
    """A verdict on text that holds no answer: it earns nothing, and is no failure of the judge."""
    return Verdict(state=VerdictState.ZERO, reward=0.0, reason=VerdictReason.NO_ANSWER)


def failure(reason: VerdictReason, text: str) -> Verdict:
    """The judge failed, which says nothing about the completion (NeMo-RL 2207)."""
    return Verdict(state=VerdictState.FAILED, reward=0.0, reason=reason, extracted=text)


def shown(text: str) -> str:
    """Text short enough to store with every verdict."""
    return text if len(text) <= MAX_EXTRACTED_CHARS else f"{text[: MAX_EXTRACTED_CHARS - 1]}…"
