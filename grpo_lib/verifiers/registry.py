"""The verifiers there are, by name. A new one is a module with a `SPEC`, and a line here."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from grpo_lib.errors import ConfigError
from grpo_lib.verifiers import exact, integer
from grpo_lib.verifiers.base import VerifierSpec

VERIFIERS: Mapping[str, VerifierSpec] = {spec.name: spec for spec in (integer.SPEC, exact.SPEC)}


def get_verifier(name: str) -> VerifierSpec:
    """The verifier of that name.

    Raises:
        ConfigError: there is none; the message suggests the nearest.
    """
    if name in VERIFIERS:
        return VERIFIERS[name]
    near = difflib.get_close_matches(name, VERIFIERS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(VERIFIERS)}"
    raise ConfigError([f"verifier.name ({name}) is not a verifier; {hint}"])
