"""An exit status in the words of a person: `-9` says nothing to somebody who does not write supervisors.

Only what is known is said. A signal of the kind that somebody sends raises the question who did, and the answer is what the
evidence rules out: this supervisor (which keeps a record of what it sent), an out-of-memory kill that anybody noted. Unless the
process did it itself because its run's config says so.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

from recovery.evidence import NO_AGENT, NO_COUNTER, Evidence
from recovery.injected import SAID, announced

SHELL = 128  # what shells and containers add to the number of the signal that ended a program
_FAULTS = frozenset(
    {signal.SIGILL, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV, signal.SIGXCPU, signal.SIGXFSZ, signal.SIGSYS}
)  # raised by what the program itself did: nobody is to be looked for


def exit_text(status: int | None) -> str:
    """A status in a few words: `killed by SIGKILL`, `exit code 1`, `exit code 137 (128 + SIGKILL)`,
    `how is not known`."""
    if status is None:
        return "how is not known"
    if status < 0:
        return f"killed by {_signal_text(-status)}"
    meant = _known(status - SHELL)
    return f"exit code {status}" + (f" ({SHELL} + {meant.name})" if meant else "")


def ended_text(who: str, status: int) -> str:
    """As a sentence on a rank (or on `agent`, the process above all ranks of a node)."""
    subject = f"rank {who}" if who.isdigit() else f"the {who}"
    return f"{subject} {'was' if status < 0 else 'ended with'} {exit_text(status)}"


def sender_text(case: Evidence, who: str, *, oom_on_record: bool) -> str:
    """Who sent the signal that ended `who`, to be appended to that sentence; empty where no one needs to have sent one."""
    status = case.exit.get(who) or 0
    number = -status if status < 0 else status - SHELL
    sent = _known(number)
    if sent is None or sent in _FAULTS:
        return ""
    if sent == signal.SIGKILL and who.isdigit() and announced(case, int(who), "kill"):
        return f", {SAID}"
    # Only a supervisor writes down the order of deaths, and with it which of them were its own doing.
    supervised = status < 0 and who in case.order and who not in case.ours
    ruled_out = ["not by this supervisor"] if supervised else []
    if sent == signal.SIGKILL and not oom_on_record:
        ruled_out.append(_no_oom(case.notes) if supervised else "no out-of-memory kill on record")
    return ", sent by nobody known" + (f": {', '.join(ruled_out)}" if ruled_out else "")


def _no_oom(notes: Sequence[str]) -> str:
    """That the kernel did not end it for want of memory, as far as its two records go."""
    told = "\n".join(notes)
    if "kernel log: no answer" in told or NO_AGENT in told:
        return "whether by the kernel for want of memory could not be asked"
    counter = NO_COUNTER if NO_COUNTER in told else "no out-of-memory kill counted by its memory cgroup"
    unread = "kernel log: not readable" in told
    return f"{counter}, {'the kernel log could not be read' if unread else 'none in the kernel log'}"


def _known(number: int) -> signal.Signals | None:
    return next((it for it in signal.Signals if it == number), None)


def _signal_text(number: int) -> str:
    known = _known(number)
    if known is None:
        return f"signal {number}"
    return f"{known.name} ({signal.strsignal(number)})" if known in _FAULTS else known.name
