"""`exact`: the completion equals the reference answer, surrounding whitespace apart. Case and inner spaces count."""

from __future__ import annotations

from grpo_lib.interfaces import Verifier
from grpo_lib.types import Prompt, Verdict
from grpo_lib.verifiers.base import VerifierSpec, judged, no_answer


def build(correct_reward: float) -> Verifier:
    """The verifier, paying `correct_reward` for a right answer."""

    def verify(prompt: Prompt, text: str) -> Verdict:
        found = text.strip()
        if not found:
            return no_answer()
        return judged(correct=found == prompt.answer.strip(), correct_reward=correct_reward, extracted=found)

    return verify


def accepts_answer(answer: str) -> bool:
    """Whether a reference answer is any text at all."""
    return bool(answer.strip())


SPEC = VerifierSpec(name="exact", build=build, accepts_answer=accepts_answer)
