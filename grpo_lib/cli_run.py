"""`grpo run`: stored runs, one command each."""

from __future__ import annotations

from typing import Any

from grpo_lib import cli_lineage

_DESCRIPTION = "Explain, compare and recompute stored runs."


def register(commands: Any) -> None:
    """Add `run` with its commands to the sub-parsers of `grpo`."""
    run = commands.add_parser("run", help=_DESCRIPTION, description=_DESCRIPTION)
    kinds = run.add_subparsers(required=True, metavar="COMMAND")
    cli_lineage.register(kinds)
