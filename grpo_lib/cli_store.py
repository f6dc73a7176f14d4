"""`grpo store`: what a store holds, whether it is whole, what nobody needs any more, and how to get something out.

Exit codes: 0 fine, 1 something is damaged, missing or could not be done, 2 the command is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from grpo_lib.config import StorageConfig
from grpo_lib.derived import gib
from grpo_lib.errors import StorageError

_DEFAULT = str(Path(StorageConfig().root) / "store")
_MIN_KEY_CHARS = 8
_MIN_GRACE_H = 1.0
_STORE = f"folder, or s3://bucket/prefix as in storage.store; {_DEFAULT} when absent"
_LS = """\
List the runs that a store knows, with what they published, and how much it holds."""
_VERIFY = """\
Hash every artifact again and compare with its key; also look for those that runs refer to and that are not there.
Exit 1 when one is damaged or missing; each is named with what to do."""
_GC = """\
Show what no run refers to, and remove it with --delete.
Nothing is touched that a run's files mention, that is younger than the grace period, or than the oldest run that gave a
sign of life within it. A run counts as long as the store knows it: --forget RUN gives it up."""
_GET = """\
Copy something out of a store, its hash checked on the way: an artifact by its key or the first 8 digits of it, or what
a run published, e.g. GRPOFlow/12 or GRPOFlow/12/model."""


def register(commands: Any) -> None:
    """Add `store` with its commands to the subparsers of `grpo`."""
    store = commands.add_parser("store", help="List, verify, clean and read a store of artifacts.")
    kinds = store.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Any, text: str) -> argparse.ArgumentParser:
        added = kinds.add_parser(
            name,
            help=text.partition("\n")[0].rstrip("."),
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.add_argument("--store", default=_DEFAULT, metavar="LOCATION", help=_STORE)
        added.set_defaults(command=command)
        return added

    add("ls", _ls, _LS).add_argument("--artifacts", action="store_true", help="also one line for each artifact")
    add("verify", _verify, _VERIFY).add_argument("--run", metavar="RUN", help="only what this run refers to")
    gc = add("gc", _gc, _GC)
    gc.add_argument("--delete", action="store_true", help="remove it; else it is only shown")
    gc.add_argument(
        "--grace-hours",
        type=float,
        default=24.0,
        metavar="H",
        help="a run that wrote nothing for so long is not at work; at least 1, and longer than between two checkpoints",
    )
    gc.add_argument("--forget", action="append", default=[], metavar="RUN", help="run to give up, repeatable")
    get = add("get", _get, _GET)
    get.add_argument("what", metavar="WHAT", help="key, RUN, or RUN/NAME")
    get.add_argument("out", metavar="OUT", type=Path, help="file, or with a run a folder; must not exist")


def _ls(options: argparse.Namespace) -> int:
    from grpo_lib.storage.registry import known_runs

    store = _open(options)
    for run in known_runs(store):
        where = "its folder is missing" if run.folder_is_missing else str(run.folder or "")
        parts = (run.run_id, _time(run.registered), f"last sign {_time(run.last_sign)}", where, *run.published)
        print("  ".join(part for part in parts if part))
    artifacts = list(store.artifacts())
    if options.artifacts:
        for one in artifacts:
            print(f"{one.name}  {one.size_bytes:>15,}  {_time(one.modified)}")
    print(f"{store.location}: {_amount(artifacts)}")
    return 0


def _verify(options: argparse.Namespace) -> int:
    from grpo_lib.storage.garbage import verify_all
    from grpo_lib.storage.registry import known_runs, references

    store = _open(options)
    runs = [run for run in known_runs(store) if options.run in (None, run.run_id)]
    if options.run and not runs:
        raise StorageError(f"{store.location} knows no run {options.run!r}; grpo store ls shows those it knows")
    refs = frozenset(ref for run in runs for ref in references(store, run).refs)
    whole, bad = 0, 0
    for one, problem in verify_all(store, refs, everything=options.run is None):
        whole += problem is None
        bad += problem is not None
        if problem is not None:
            print(f"BAD   {one.name}  {problem}")
    print(f"{store.location}: {whole} artifacts whole, {bad} damaged or missing; {len(runs)} runs refer to {len(refs)}")
    return 1 if bad else 0


def _gc(options: argparse.Namespace) -> int:
    from grpo_lib.storage.garbage import plan, remove
    from grpo_lib.storage.registry import forget

    if options.grace_hours < _MIN_GRACE_H:
        print(f"grpo: --grace-hours ({options.grace_hours:g}) must be at least {_MIN_GRACE_H:g}", file=sys.stderr)
        return 2
    store = _open(options)
    grace_s = options.grace_hours * 3600
    found = plan(store, grace_s=grace_s, forgotten=options.forget)
    for one in found.garbage:
        print(f"garbage  {one.name}  {one.size_bytes:>15,}  {_time(one.modified)}")
    print(f"{store.location}: {len(found.runs)} runs, {len(found.live)} of them at work or just ended")
    print(f"  referred to   {_amount(found.referred)}")
    print(f"  too young     {_amount(found.young)}, stored since {_time(found.cutoff)}")
    print(f"  garbage       {_amount(found.garbage)}, and {len(found.unfinished)} unfinished uploads")
    if not options.delete:
        print("nothing was removed; --delete does it")
        return 0
    for run_id in options.forget:
        forget(store, run_id)
    print(f"removed {_amount(remove(store, found))}")
    return 0


def _get(options: argparse.Namespace) -> int:
    from grpo_lib.storage.mirror import RunMirror
    from grpo_lib.storage.refs import StoreKind, StoreRef
    from grpo_lib.storage.registry import known_runs

    store, what, out = _open(options), options.what.strip("/"), options.out.absolute()
    if out.exists():
        raise StorageError(f"{out} exists; name a new one")
    run = next((run for run in known_runs(store) if what == run.run_id or what.startswith(f"{run.run_id}/")), None)
    if run is not None:
        wanted = [name for name in run.published if f"{run.run_id}/{name}" == what or what == run.run_id]
        if not wanted:
            has = ", ".join(run.published) or f"nothing; its folder is {run.folder}"
            raise StorageError(f"run {run.run_id} did not publish {what!r}; it published {has}")
        RunMirror(store, run_id=run.run_id, folder=out).fetch(*(out / name for name in wanted))
        print(f"{out}: {', '.join(wanted)}")
        return 0
    found = [one for one in store.artifacts() if len(what) >= _MIN_KEY_CHARS and one.name.startswith(what)]
    if len(found) != 1:
        raise StorageError(
            f"{what!r} is no run of {store.location}, and {len(found)} artifacts have a key that begins so; give a run "
            f"or at least {_MIN_KEY_CHARS} digits of one key, see grpo store ls --artifacts"
        )
    store.copy(StoreRef(key=found[0].name, size_bytes=found[0].size_bytes, kind=StoreKind.FILE), out)
    print(f"{out}: {found[0].size_bytes:,} bytes, sha256 {found[0].name}")
    return 0


def _open(options: argparse.Namespace) -> Any:
    from grpo_lib.storage.locations import is_remote, open_store

    if not is_remote(options.store) and not Path(options.store).is_dir():
        raise StorageError(f"{options.store} is not a folder, so no store; name it with --store")
    return open_store(options.store.rstrip("/"))


def _amount(things: Iterable[Any]) -> str:
    sizes = [one.size_bytes for one in things]
    return f"{len(sizes):,} artifacts, {gib(sum(sizes))}"


def _time(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
