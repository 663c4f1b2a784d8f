"""Who may take the machine away, and when: the scheduler's time limit, and the notices of spot and maintenance events.

Sources differ in form, not in meaning, so reading (pure, below) is apart from asking (a file, a URL, `squeue`), and all of it
runs in a thread: a metadata server that does not answer must not keep the coordinator from answering a death. What cannot be
asked is no notice; the run must not end because a clock or a server is wrong.
"""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from recovery.horizon import Notice, Pace, last_call, soonest
from recovery.preflight import Concern

log = logging.getLogger(__name__)

ASK_LIMIT_S = 2.0
SQUEUE_LIMIT_S = 10.0
SQUEUE_EVERY_S = 60.0  # the controller serves thousands of jobs
LATEST_T = 253_402_300_799.0
MAX_BYTES = 64 * 1024
QUOTED = 80  # signs of a notice that nobody understands
TIMES = ("time", "notBefore", "NotBefore", "ends_t")
NO_NOTICE = frozenset({"FALSE", "NONE", ""})
TAKES_AWAY = frozenset({"Preempt", "Terminate", "Reboot", "Redeploy"})
HEADERS = {"Metadata-Flavor": "Google", "Metadata": "true"}  # what two large clouds insist on; others do not mind

Ask = Callable[[float], Notice | None]


def read_notice(text: str, *, by: str) -> Notice | None:
    """What a notice says: the JSON of AWS and Azure, the words of Google, a unix time or an ISO date. Anything else is a notice
    without a time too, whose words are quoted: to leave in vain costs less than to stay in vain.
    """
    said = text.strip()
    if said.upper() in NO_NOTICE:
        return None
    words = said.upper() == "TRUE" or "MAINTENANCE" in said.upper()
    class_ = "host_maintenance" if "MAINTENANCE" in said.upper() else "preemption"
    try:
        record = json.loads(said)
    except (ValueError, RecursionError):
        record = said
    if isinstance(record, dict) and isinstance(record.get("Events"), list):
        return _of_events(record["Events"], by)
    stamp = next((record[key] for key in TIMES if key in record), "") if isinstance(record, dict) else record
    ends_t = read_time(str(stamp))
    quoted = said if len(said) <= QUOTED else f"{said[:QUOTED]}..."
    return Notice(class_=class_, by=by if words or ends_t is not None else f"{by}, which says {quoted!r}", ends_t=ends_t)


def _of_events(listed: Sequence[Any], by: str) -> Notice | None:
    """Azure's scheduled events: those that end the machine."""
    found = [event for event in listed if isinstance(event, dict) and event.get("EventType") in TAKES_AWAY]
    return soonest(
        Notice(
            class_="preemption" if event["EventType"] in ("Preempt", "Terminate") else "host_maintenance",
            by=f"{by} ({event['EventType']})",
            ends_t=read_time(str(event.get("NotBefore", ""))),
        )
        for event in found
    )


def read_time(text: str) -> float | None:
    """Unix seconds of a time in one of the usual forms; None if it is none, or before 1970 or after the year 9999."""
    for read in (float, _iso, lambda said: parsedate_to_datetime(said).timestamp()):
        with contextlib.suppress(ValueError, TypeError, OverflowError):
            seconds = read(text)
            return seconds if 0 <= seconds <= LATEST_T else None
    return None


def _iso(text: str) -> float:
    parsed = datetime.fromisoformat(text)
    return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()


def read_left(text: str) -> float | None:
    """Seconds in Slurm's form of a duration (`1-02:03:04`, `02:03:04`, `03:04`); None for UNLIMITED and the like."""
    days, dash, clock = text.strip().rpartition("-")
    parts = clock.split(":")
    if not (2 <= len(parts) <= 3 and all(part.isdecimal() for part in parts) and (days.isdecimal() or not dash)):
        return None
    seconds = 0
    for part in parts:
        seconds = seconds * 60 + int(part)
    return float(seconds + (int(days) * 86_400 if days else 0))


def slurm(env: Mapping[str, str], ask: Callable[[str], str | None]) -> Ask:
    """The end of this Slurm job: what the controller says now (a limit may be moved), else what the job was started with."""
    job, started_with = env.get("SLURM_JOB_ID", ""), read_time(env.get("SLURM_JOB_END_TIME", ""))
    known: dict[str, float | None] = {"asked_t": None, "ends_t": started_with}

    def look(now_t: float) -> Notice | None:
        asked_t = known["asked_t"]
        if asked_t is None or now_t - asked_t >= SQUEUE_EVERY_S:
            known["asked_t"] = now_t
            left_s = read_left(ask(job) or "")
            known["ends_t"] = now_t + left_s if left_s is not None else known["ends_t"]
        ends_t = known["ends_t"]
        return Notice(class_="time_limit", by=f"time limit of Slurm job {job}", ends_t=ends_t) if ends_t is not None else None

    return look


def squeue(job: str) -> str | None:
    """What `squeue` says of the time left, None if it says nothing."""
    try:
        argv = ["squeue", "--noheader", "--format=%L", "--jobs", job]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=SQUEUE_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def notice_at(where: str) -> Ask:
    """A file whose existence is a notice, or a URL that answers with one."""
    if where.startswith(("http://", "https://")):
        return lambda now_t: _of_url(where)
    return lambda now_t: _of_file(Path(where))


def _of_file(path: Path) -> Notice | None:
    try:
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        return None
    by = f"notice {path}"
    return read_notice(text, by=by) if text.strip() else Notice(class_="preemption", by=by)


def _of_url(url: str) -> Notice | None:
    try:
        text = _get(url, HEADERS)
    except urllib.error.HTTPError as error:
        if error.code != 401:  # 404 is how AWS says that there is none
            return None
        token = _get(f"{urlsplit(url).scheme}://{urlsplit(url).netloc}/latest/api/token", _TOKEN, method="PUT")
        try:
            text = _get(url, {**HEADERS, "X-aws-ec2-metadata-token": token})
        except urllib.error.HTTPError:
            return None
    return read_notice(text, by=f"notice of {urlsplit(url).hostname}")


_TOKEN = {"X-aws-ec2-metadata-token-ttl-seconds": "300"}


def _get(url: str, headers: Mapping[str, str], *, method: str = "GET") -> str:
    request = urllib.request.Request(url, headers=dict(headers), method=method)
    with urllib.request.urlopen(request, timeout=ASK_LIMIT_S) as answer:
        return str(answer.read(MAX_BYTES).decode(errors="replace"))


def probe(where: str) -> str:
    """A check of `recovery.preflight`: `where` can be asked, and announces nothing yet."""
    is_url = where.startswith(("http://", "https://"))
    folder = Path(where).absolute().parent
    if not is_url and not folder.is_dir():
        raise Concern(f"{where}: there is no folder {folder}, so no notice can appear in it; make it, or set recovery.notice")
    try:
        found = notice_at(where)(time.time())
    except (OSError, ValueError) as error:
        raise Concern(f"{where} cannot be asked ({error}): no notice will be heard of; see recovery.notice") from error
    if found is not None:
        call = last_call(found, Pace(), now_t=time.time(), margin_s=0.0)
        in_time = f"{found.by}: {(found.ends_t or 0.0) - time.time():.0f} s are left of this machine"
        raise Concern(f"{call.reason}. If that is an old notice, take it away first" if call.stop else in_time)
    return f"{where} announces nothing"


def sources(env: Mapping[str, str], where: str) -> list[Ask]:
    """Whom to ask on this machine."""
    found = [notice_at(where)] if where else []
    return [*found, slurm(env, squeue)] if env.get("SLURM_JOB_ID") else found


class Lookout:
    """A thread that asks every source every `poll_s`; no thread if there is nobody to ask."""

    def __init__(self, asked: Sequence[Ask], *, poll_s: float, clock: Callable[[], float]) -> None:
        """Look once now and then."""
        self._asked, self._poll_s, self._clock = asked, poll_s, clock
        self._seen: Notice | None = None
        self._over = threading.Event()
        if asked:
            threading.Thread(target=self._work, name="lookout", daemon=True).start()

    @property
    def notice(self) -> Notice | None:
        """The soonest end that is known."""
        return self._seen

    def close(self) -> None:
        """Look no more."""
        self._over.set()

    def _work(self) -> None:
        while not self._over.is_set():
            self.look()
            self._over.wait(self._poll_s)

    def look(self) -> None:
        """Ask everybody once."""
        found = [self._ask(ask) for ask in self._asked]
        self._seen = soonest(notice for notice in found if notice is not None)

    def _ask(self, ask: Ask) -> Notice | None:
        try:
            return ask(self._clock())
        except (OSError, ValueError) as error:
            log.debug("a source of notices does not answer: %s", error)
            return None
