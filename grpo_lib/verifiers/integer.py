"""`integer`: the whole completion is one integer, compared by value.

    text      = whitespace* [sign] digit+ whitespace*
    sign      = "+" | "-"
    digit     = "0" … "9"            ASCII only
    at most MAX_DIGITS digits

Anything else is no answer: ``12.0``, ``1e3``, ``x = 12``, ``10,000`` (elsewhere the comma is a decimal mark, and a
model that is rewarded for guessing keeps guessing), other scripts' digits. Values are compared as normalised digit
strings. Nothing is evaluated or converted, so a megabyte of digits costs one scan, and ``int()``'s digit limit and
quadratic time play no part.
"""

from __future__ import annotations

import re

from grpo_lib.interfaces import Verifier
from grpo_lib.types import Prompt, Verdict
from grpo_lib.verifiers.base import VerifierSpec, judged, no_answer

MAX_DIGITS = 1000
_INTEGER = re.compile(rf"([+-]?)([0-9]{{1,{MAX_DIGITS}}})")


def parse_integer(text: str) -> str | None:
    """The canonical digit string of a text that is one integer, such as ``"-42"`` for ``" -042 "``; None otherwise."""
    match = _INTEGER.fullmatch(text.strip())
    if match is None:
        return None
    sign, digits = match.groups()
    digits = digits.lstrip("0")
    if not digits:
        return "0"  # minus zero is zero
    return f"-{digits}" if sign == "-" else digits


def build(correct_reward: float) -> Verifier:
    """The verifier, paying `correct_reward` for a right answer."""

    def verify(prompt: Prompt, text: str) -> Verdict:
        found = parse_integer(text)
        if found is None:
            return no_answer()
        return judged(correct=found == parse_integer(prompt.answer), correct_reward=correct_reward, extracted=found)

    return verify


def accepts_answer(answer: str) -> bool:
    """Whether a reference answer is an integer itself."""
    return parse_integer(answer) is not None


SPEC = VerifierSpec(name="integer", build=build, accepts_answer=accepts_answer)
