"""Scripts that take one GPU after the other: started ahead, given the card in turn, and ended with all they started."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import psutil

_HERE = Path(__file__).resolve().parent
_SHOWN_LINES = 60
_SHOWN_CHARS = 300  # of how a row failed
_MARK = "GPU_BENCHMARK_PART"  # in the environment of all that a part starts, whoever its parent is by then
_LEAST_S = 30.0  # no part is begun with less time left
_ENDING_S = 8.0  # for what a part has started to end by itself
_IDLE_MIB = 2_000  # in use on a card that nobody works on

Results = Mapping[str, Mapping[str, Any]]  # each part's JSON by its name


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One script and the seconds that are planned for it on the card."""

    key: str
    name: str
    title: str
    script: str
    needs: Literal["random", "trained"] | None
    arguments: tuple[str, ...] = ()
    limit_s: float  # from the moment the card is free for it


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A part under way. It waits for its own lock, which is held here until the card is free for it."""

    part: Part
    command: tuple[str, ...]
    process: subprocess.Popen[bytes]
    folder: Path
    mark: str
    lock: IO[str]

    @property
    def output(self) -> Path:
        return self.folder / f"{self.part.name}.json"

    def printed(self, suffix: str) -> str:
        return (self.folder / f"{self.part.name}.{suffix}").read_text(errors="replace")


class Runner:
    """Runs parts in their order, at most two at a time: one on the card, the next one importing.

    Args:
        models: Folder by what a part needs; a part whose folder is missing is not run.
        seconds: Limit of all parts together.
        keep: Called with all results after every part.
    """

    def __init__(
        self,
        folder: Path,
        models: Mapping[str, Path | str],
        *,
        seconds: float,
        keep: Callable[[Results], object],
    ) -> None:
        self._folder, self._models, self._seconds, self._keep_all = folder, models, seconds, keep
        self._began = time.monotonic()
        self.results: dict[str, dict[str, Any]] = {}

    def run(self, parts: Sequence[Part]) -> None:
        """All parts; what each left is in `results` afterwards."""
        waiting = list(parts)
        alive: list[Started] = []
        try:
            while waiting or alive:
                while waiting and len(alive) < 2:
                    if started := self._start(waiting.pop(0)):
                        alive.append(started)
                if alive:
                    self._finish(alive[0])
                    del alive[0]
        finally:
            for started in alive:
                ended(started.process, started.mark, 0.0)

    @property
    def _left_s(self) -> float:
        return self._seconds - (time.monotonic() - self._began)

    def _start(self, part: Part) -> Started | None:
        model = self._models.get(part.needs) if part.needs else None
        failure = None
        if self._left_s < _LEAST_S:
            failure = f"not run: {self._seconds:g} s are over"
        elif part.needs and not isinstance(model, Path):
            failure = f"not run: {model or f'it needs a folder with {part.needs} weights'}"
        if failure:
            self._keep(part, {"rows": [{"case": part.name, "failed": failure}]})
            return None
        lock = (self._folder / f"{part.name}.lock").open("a")
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = (
            sys.executable,
            str(_HERE / part.script),
            *("--out", str(self._folder / f"{part.name}.json")),
            *("--lock", lock.name),
            *(("--model", str(model)) if part.needs else ()),
            *part.arguments,
        )
        mark = uuid.uuid4().hex
        with (
            (self._folder / f"{part.name}.txt").open("wb") as text,
            (self._folder / f"{part.name}.log").open("wb") as log,
        ):
            process = subprocess.Popen(
                command, stdout=text, stderr=log, env={**environment(), _MARK: mark}, start_new_session=True
            )
        return Started(part=part, command=command, process=process, folder=self._folder, mark=mark, lock=lock)

    def _finish(self, started: Started) -> None:
        part = started.part
        used = wait_for_idle_card()
        begun = time.monotonic()
        limit_s = min(part.limit_s, max(self._left_s, 1.0))
        started.lock.close()  # the card is this part's
        try:
            ending = f"exit status {started.process.wait(timeout=limit_s)}"
        except subprocess.TimeoutExpired:
            ending = f"stopped after {limit_s:.0f} s of the card"
        card_s = time.monotonic() - begun
        stray = ended(started.process, started.mark, _ENDING_S if started.process.poll() is not None else 0.0)
        result = self._result_of(started, ending)
        result["card_s"] = card_s
        if used:
            result["others_mib"] = used  # somebody else's memory on the card while this was measured
        if stray:
            result["ended_by_force"] = stray
        self._keep(part, result)

    def _result_of(self, started: Started, ending: str) -> dict[str, Any]:
        """What it wrote, which may be a part of what it was to write."""
        result: dict[str, Any] = {}
        if started.output.is_file():
            result = json.loads(started.output.read_text())
        else:
            log = started.printed("log") + started.printed("txt")
            result["rows"] = [{"case": started.part.name, "failed": ending, "log": log[-3000:]}]
        if ending.startswith("stopped") and started.output.is_file():
            log = started.printed("log")[-3000:]
            result.setdefault("rows", []).append({"case": started.part.name, "failed": ending, "log": log})
        result.setdefault("table", last_lines(started.printed("txt")))
        result["command"] = shlex.join([Path(started.command[1]).name, *started.command[2:]])
        return result

    def _keep(self, part: Part, result: dict[str, Any]) -> None:
        self.results[part.name] = result
        ending = "; ".join(said(row) for row in failures(result)) or "done"
        seconds = f", {result['card_s']:.0f} s of the card" if "card_s" in result else ""
        print(f"[{time.monotonic() - self._began:5.0f} s] {part.key} {part.name}{seconds}: {ending}", flush=True)
        self._keep_all(self.results)


def environment() -> dict[str, str]:
    """Of every part. Segments that grow cannot be shared through CUDA IPC, so a part asks for them itself."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTORCH_CUDA_ALLOC_CONF"}
    paths = [str(_HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**kept, "PYTHONPATH": os.pathsep.join(paths), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


def ended(process: subprocess.Popen[bytes], mark: str, grace_s: float) -> list[str]:
    """Wait for a part's processes to end, then kill them; names of those that had to be."""
    tree = descendants(process)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and any(True for _ in marked(mark)):
        time.sleep(0.2)
    killed: dict[psutil.Process, str] = {}
    for one in {*tree, *marked(mark)}:
        try:
            name = one.name()
            one.kill()  # psutil makes sure that it is still the same process
            killed[one] = name
        except psutil.NoSuchProcess:
            continue
    process.wait()
    psutil.wait_procs(killed, timeout=3.0)  # their memory is free once they are gone
    return list(killed.values())


def descendants(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Ray's workers write their names over their environment, and are found as what they descend from."""
    try:
        root = psutil.Process(process.pid)
        return [*root.children(recursive=True), root] if process.poll() is None else []
    except psutil.NoSuchProcess:
        return []


def marked(mark: str) -> Iterator[psutil.Process]:
    """Processes of a part, those included whose parent has ended before them."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                yield process
        except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            continue


def wait_for_idle_card(limit_s: float = 15.0) -> int:
    """MiB that others still use when the wait is over; 0 on a card that is free, or that nobody can ask."""
    deadline = time.monotonic() + limit_s
    while (used := used_mib()) > _IDLE_MIB:
        if time.monotonic() > deadline:
            return used
        time.sleep(0.3)
    return 0


def used_mib() -> int:
    ask = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    if shutil.which(ask[0]) is None:
        return 0
    said = subprocess.run(ask, capture_output=True, text=True, check=False, timeout=30).stdout.strip()
    return int(said) if said.isdecimal() else 0


def failures(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Rows of a part that say how they failed."""
    rows = [row for row in result.get("rows", ()) if "failed" in row and not row.get("skipped")]
    named = result.get("failed") or {}
    return [*rows, *({"case": name, "failed": one["failed"]} for name, one in named.items())]


def left_out(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Rows of a part that it had no time for."""
    return [row for row in result.get("rows", ()) if row.get("skipped")]


def said(row: Mapping[str, Any]) -> str:
    """A row without numbers, in one line."""
    why = " ".join(str(row["failed"]).split())[:_SHOWN_CHARS]
    return f"{row['case']}: {why}" if row.get("skipped") else f"{row['case']} FAILED: {why}"


def last_lines(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-_SHOWN_LINES:])
