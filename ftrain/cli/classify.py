"""`ftrain classify`: what interrupted a run, from evidence that somebody wrote down.

ftrain classify incident.json --explain

The very code that the supervisor runs, on a file: to check a verdict, to try a site's own signatures, to judge the classifier.
"""

from __future__ import annotations

import io
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import click
import msgspec

from ftrain.cli import render
from ftrain.nearest import slip
from recovery.classify import Explanation, explain
from recovery.codes import ExitCode
from recovery.evidence import ErrorReport, Evidence
from recovery.policy import History, Limits, decide
from recovery.templates import Table, TableError, load_table

Fields = dict[str, msgspec.Raw]

SHOWN = 8  # lines considered and discarded that the text form shows
LOG_BYTES = 4 << 20  # of a plain log, from its end, where the error is: at worst ten seconds of work, never gigabytes in memory
HEAD_BYTES = 64 * 1024  # to tell a log from JSON: blank lines may come first
# `[` also begins the lines of many a log (`[rank0]: ...`, `[2026-01-31 ...`): only an array of cases begins like this.
_JSON = re.compile(rb"\s*(\{|\[\s*([{\]]|$))")
# Many a program logs JSON lines, and Python prints dicts: a case is what has a case's fields.
_FIELD = re.compile(rb'"exit"\s*:\s*\{|"(log|kernel|scheduler)"\s*:\s*\[|^\s*\[\s*\]?\s*$')
_BESIDE = frozenset({"set", "source", "label", "class", "action", "rank", "accept", "why", "tricky", "grounding"})
"""What collections of cases note of a case, for whoever judges the verdicts; it is no evidence."""


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line for each case.")
@click.option("--explain", "with_reasons", is_flag=True, help="Also which lines were weighed, and which discarded and why.")
@click.option(
    "--signatures",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A site's own signature table (TOML), merged over the shipped one.",
)
def classify(files: tuple[Path, ...], as_json: bool, with_reasons: bool, signatures: Path | None) -> None:
    """Say what interrupted each case of FILES: recorded incidents, or plain logs of any software (`-` is stdin).

    JSON with a field exit (an object), log, kernel or scheduler (arrays) holds cases: one object, an array, or one object a
    line; so does what a worker wrote of its last exception (rank-00003.error.json). Any other file is the log of one case, also
    one of JSON lines, named like the file; of a log larger than 4 MiB the end is read.

    \b
    Examples:
      ftrain classify incidents.jsonl --json
      ftrain classify slurm-4711.out --explain
    """
    try:
        table = load_table(signatures)
        for file in files:
            for case in read_cases(file):
                _show(case, table, as_json=as_json, with_reasons=with_reasons)
    except (TableError, msgspec.DecodeError) as error:
        render.fail(str(error), ExitCode.USAGE)
    except RecursionError:
        render.fail("JSON that is nested so deeply holds no case", ExitCode.USAGE)


def read_cases(file: Path) -> Iterator[Evidence]:
    """The cases of a file: one JSON object, a JSON array, or one object a line; a plain log is one case. Nothing in nothing."""
    with _stdin() if str(file) == "-" else file.open("rb") as stream:
        head = stream.read(HEAD_BYTES)
        if not head.strip():
            render.note(f"{file}: nothing stands in it")
            return
        if not _holds_cases(head):
            yield _log(file, stream)
            return
        stream.seek(0)
        whole = stream.read().strip()
    if report := _error_report(whole):
        yield Evidence(id=file.name, log=report.log())
        return
    told = set[str]()
    for case, fields in _decoded(file, whole):
        _note_unknown(file, fields, told)
        yield case


def _decoded(file: Path, whole: bytes) -> Iterator[tuple[Evidence, Fields]]:
    """Each case, with its fields as they are called there."""
    if whole.startswith(b"["):
        cases = msgspec.json.decode(whole, type=list[Evidence])
        yield from zip(cases, msgspec.json.decode(whole, type=list[Fields]), strict=True)
        return
    try:
        yield msgspec.json.decode(whole, type=Evidence), msgspec.json.decode(whole, type=Fields)
    except msgspec.DecodeError:
        for number, line in enumerate(whole.splitlines(), start=1):
            if line.strip():
                yield _case(file, number, line), msgspec.json.decode(line, type=Fields)


def _note_unknown(file: Path, fields: Iterable[str], told: set[str]) -> None:
    """Once for each: a field by another name is evidence that nobody weighs, and the verdict the weaker for it."""
    known = Evidence.__struct_fields__
    for name in (field for field in fields if field not in told | _BESIDE | set(known)):
        near = slip(name, known)
        meant = f"did you mean {near}?" if near else f"known: {', '.join(known)}"
        render.note(f"{file}: the field {name} is not looked at; {meant}")
        told.add(name)


def _stdin() -> IO[bytes]:
    """What is piped in, in a file: of a log that has no end in sight only the end is read into memory."""
    spooled = tempfile.TemporaryFile()  # noqa: SIM115  (the caller closes it)
    shutil.copyfileobj(sys.stdin.buffer, spooled)
    spooled.seek(0)
    return spooled


def _holds_cases(head: bytes) -> bool:
    """Whether a file that begins like this is no log. A single object with an exit is a case, if with a slip in it."""
    if not _JSON.match(head):
        return False
    if _FIELD.search(head) or _error_report(head):
        return True
    try:
        found = msgspec.json.decode(head)
    except (msgspec.DecodeError, RecursionError):
        return False
    return isinstance(found, dict) and "exit" in found


def _error_report(whole: bytes) -> ErrorReport | None:
    """What a worker wrote down of its end, if this is that."""
    try:
        return msgspec.json.decode(whole, type=ErrorReport)
    except (msgspec.DecodeError, RecursionError):
        return None


def _log(file: Path, stream: IO[bytes]) -> Evidence:
    """A log that some software wrote, or its end; of statuses, kernel and scheduler nothing is known."""
    size = stream.seek(0, io.SEEK_END)
    stream.seek(max(0, size - LOG_BYTES))
    lines = stream.read().decode("utf-8", "replace").splitlines()
    if size > LOG_BYTES:
        lines = lines[1:]  # the first is cut
        render.note(f"{file}: the last {LOG_BYTES} of {size} bytes were read; lines are counted from there")
    return Evidence(id="stdin" if str(file) == "-" else file.name, log=tuple(lines))


def _case(file: Path, number: int, line: bytes) -> Evidence:
    try:
        return msgspec.json.decode(line, type=Evidence)
    except msgspec.DecodeError as error:
        raise msgspec.DecodeError(f"{file}, line {number}: not a case: {error}") from error


def answer(case: Evidence, found: Explanation) -> dict[str, Any]:
    """The verdict as the cases' README asks for it; the action is what the default policy does at a first occurrence."""
    verdict = found.verdict
    return {
        "id": case.id,
        "class": verdict.class_,
        "component": verdict.component,
        "planned": verdict.planned,
        "first_failing_rank": verdict.first_failing_rank,
        "retryable": verdict.retryable,
        "action": decide(verdict, History(), Limits()).action,
        "confidence": verdict.confidence,
        "reason": verdict.reason,
        "evidence": msgspec.to_builtins(verdict.evidence),
    }


def _show(case: Evidence, table: Table, *, as_json: bool, with_reasons: bool) -> None:
    found = explain(case, table)
    said = answer(case, found)
    if as_json:
        more = {"considered": found.considered, "discarded": found.discarded} if with_reasons else {}
        render.data(msgspec.json.encode(said | more).decode())
        return
    rank = "" if said["first_failing_rank"] is None else f", first rank {said['first_failing_rank']}"
    name = f"{case.id}: " if case.id else ""
    render.data(f"{name}{said['class']} ({said['component']}){rank}; {said['action']}; confidence {said['confidence']:.2f}")
    render.data(f"  {said['reason']}")
    for line in found.verdict.evidence:
        render.data(f"  evidence {line.where}:{line.line}: {line.text}")
    if with_reasons:
        _show_reasons(found)


def _show_reasons(found: Explanation) -> None:
    for seen in found.considered[:SHOWN]:
        render.data(f"  weighed   {seen.weight:3d} {seen.signature} ({seen.class_}) {seen.where}:{seen.line}: {seen.text}")
    for gone in found.discarded[:SHOWN]:
        render.data(f"  discarded {gone.signature} {gone.where}:{gone.line}: {gone.why}: {gone.text}")
    rest = max(0, len(found.considered) - SHOWN) + max(0, len(found.discarded) - SHOWN)
    if rest:
        render.data(f"  and {rest} more lines (--json shows all)")
