"""A small event loop for agent and coordinator: sockets, timers, signals and children in one thread.

Why not asyncio: these processes wait for a dozen descriptors, and what matters is that every reaction is a plain function
call in a known order, that nothing runs between "decided" and "written to the ledger", and that signals and children are seen
at once (through one wake-up descriptor) without handlers that run in the middle of something else.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import os
import queue
import selectors
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from recovery.wire import Channel, Frame, WireError

log = logging.getLogger(__name__)

MAX_WAIT_S = 60.0
SLACK = 0.5
"""Of its interval: how long a recurring call may wait for company."""


@dataclass(order=True, slots=True)
class Timer:
    """A call that will be made once; `cancel` it at any time."""

    t: float
    order: int
    call: Callable[[], None] = field(compare=False)
    cancelled: bool = field(default=False, compare=False)

    def cancel(self) -> None:
        """Forget it."""
        self.cancelled = True


@dataclass(slots=True, kw_only=True)
class Recurring:
    """A call that is made again and again; `due` on the monotonic clock."""

    interval_s: float
    call: Callable[[], None]
    due: float


class Loop:
    """Selector, timers and signals. `wake` may be called from any thread, everything else from the loop's own."""

    def __init__(self) -> None:
        """An empty loop that owns an epoll and an eventfd."""
        self._selector = selectors.DefaultSelector()
        self._timers: list[Timer] = []
        self._order = itertools.count()
        self._signals: dict[int, Callable[[], None]] = {}
        self._arrived: set[int] = set()
        self._recurring: list[Recurring] = []
        self._flushes: list[Callable[[], None]] = []
        self._soon: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.add(self._wakeup, self._woken)

    def add(self, fd: int, readable: Callable[[], None]) -> None:
        """Call `readable` whenever `fd` has something."""
        self._selector.register(fd, selectors.EVENT_READ, (readable, None))

    def set_writer(self, fd: int, readable: Callable[[], None], writable: Callable[[], None] | None) -> None:
        """Also call `writable` whenever `fd` takes bytes; None: not any more."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writable else 0)
        self._selector.modify(fd, events, (readable, writable))

    def remove(self, fd: int) -> None:
        """Forget a descriptor; call before closing it."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(fd)

    def after(self, delay_s: float, call: Callable[[], None]) -> Timer:
        """Call once, `delay_s` from now."""
        timer = Timer(time.monotonic() + delay_s, next(self._order), call)
        heapq.heappush(self._timers, timer)
        return timer

    def every(self, interval_s: float, call: Callable[[], None]) -> None:
        """Call again and again, for as long as the loop lives: in the first round after the interval that something else has
        caused, and only if there is none, half an interval later, in a round of its own. A wake-up costs more than the call."""
        self._recurring.append(Recurring(interval_s=interval_s, call=call, due=time.monotonic() + interval_s))

    def on_signal(self, numbers: Iterable[int], call: Callable[[int], None]) -> None:
        """Have `call(number)` made from the loop, not from inside the handler."""
        for number in numbers:
            self._signals[number] = lambda number=number: call(number)  # type: ignore[misc]
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._arrived.add(number)
        self.wake()

    def wake(self) -> None:
        """End the current wait. Safe from any thread and from signal handlers."""
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wakeup, 1)

    def call_soon(self, call: Callable[[], None]) -> None:
        """Have a call made by the loop. Safe from any thread."""
        self._soon.put(call)
        self.wake()

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wakeup)
        while not self._soon.empty():
            self._soon.get()()

    def flush_later(self, flush: Callable[[], None]) -> None:
        """Have a call made before the next wait, after everything of this round: what is to leave together."""
        self._flushes.append(flush)

    def _flush(self) -> None:
        flushes, self._flushes = self._flushes, []
        for flush in flushes:
            flush()

    def run_once(self, timeout_s: float = MAX_WAIT_S) -> None:
        """Wait for something, at most so long, and handle what has come."""
        self._flush()
        for key, events in self._selector.select(max(0.0, min(timeout_s, self._next_t() - time.monotonic()))):
            readable, writable = key.data
            if events & selectors.EVENT_WRITE and writable is not None and self._is_current(key):
                writable()
            if events & selectors.EVENT_READ and self._is_current(key):
                readable()
        self._run_signals()
        self._run_timers()
        self._flush()

    def _is_current(self, key: selectors.SelectorKey) -> bool:
        """Whether no earlier callback of this round changed the registration (the number may be another file by now)."""
        now = self._selector.get_map().get(key.fd)
        return now is not None and now.data is key.data

    def _run_signals(self) -> None:
        while self._arrived:
            self._signals[self._arrived.pop()]()

    def _next_t(self) -> float:
        """When a timer or a recurring call must be carried out, whatever comes."""
        times = [it.due + SLACK * it.interval_s for it in self._recurring]
        return min([*times, self._timers[0].t if self._timers else float("inf")], default=float("inf"))

    def _run_timers(self) -> None:
        now = time.monotonic()
        for it in self._recurring:
            if it.due <= now:
                it.due = now + it.interval_s
                it.call()
        while self._timers and self._timers[0].t <= now:
            timer = heapq.heappop(self._timers)
            if not timer.cancelled:
                timer.call()

    def wait_for(self, condition: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Handle events until the condition holds (True) or the time is up (False)."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not condition():
            left = MAX_WAIT_S if deadline is None else deadline - time.monotonic()
            if left <= 0:
                return False
            self.run_once(min(left, MAX_WAIT_S))
        return True

    def close(self) -> None:
        """Give the descriptors back; the signals keep their handlers."""
        self._selector.close()
        with contextlib.suppress(OSError):
            os.close(self._wakeup)


class Port:
    """A channel attached to a loop: frames arrive as calls, writes continue by themselves, the end is told once."""

    def __init__(
        self, loop: Loop, channel: Channel[Any], on_frame: Callable[[Frame[Any]], None], on_close: Callable[[], None]
    ) -> None:
        """Start listening at once."""
        self._loop = loop
        self.channel = channel
        self._on_frame = on_frame
        self._on_close: Callable[[], None] | None = on_close
        self._fd = channel.fileno()
        self._attached = True
        self._resting = False
        self._writing = False
        self._flush_due = False
        loop.add(self._fd, self._readable)

    def _detach(self) -> None:
        if self._attached:
            self._attached = False
            self._loop.remove(self._fd)

    def take_over(self, on_frame: Callable[[Frame[Any]], None], on_close: Callable[[], None]) -> None:
        """Frames and the end go to somebody else from now on."""
        self._on_frame = on_frame
        self._on_close = on_close

    @property
    def closed(self) -> bool:
        """Whether the other end is gone."""
        return self.channel.closed

    def send(self, message: object, fds: tuple[int, ...] = ()) -> None:
        """Queue a message; it is dropped if the other end is gone. What is queued in one round of the loop is sent at once, at
        its end: the other side is woken once."""
        if not self._flush_due and not self.closed:
            self._flush_due = True
            self._loop.flush_later(self._write)
        self.channel.queue(message, fds)

    def _write(self) -> None:
        self._flush_due = False
        self.channel.flush()
        self._after_write()

    def _after_write(self) -> None:
        if self.channel.closed:
            self._readable()  # its last words, and the end
        elif self._attached and self._writing != self.channel.wants_write:
            self._writing = self.channel.wants_write
            self._loop.set_writer(self._fd, self._readable, self._write if self._writing else None)

    def rest(self) -> None:
        """Listen no more: the other end says by another way when there is something, and `poll` reads it."""
        self._resting = True
        self._detach()

    def pause(self, paused: bool) -> None:
        """Stop reading (the sender will wait), or go on: how a full queue is pushed back to where it comes from."""
        if self.closed or self._resting or paused != self._attached:
            return
        if paused:
            self._detach()
        else:
            self._attached, self._writing = True, False
            self._loop.add(self._fd, self._readable)
            self._after_write()

    def poll(self) -> None:
        """Handle what has already arrived, now: of one that is not listened to, or the last words of a dead process."""
        if self.channel.wants_write:
            self._write()
        if not self.closed:
            self._readable()

    def _readable(self) -> None:
        try:
            frames = self.channel.read()
        except WireError as error:
            log.warning("connection dropped: %s", error)
            frames = []
        for frame in frames:
            self._on_frame(frame)
        if self.channel.closed:
            self._ended()

    def _ended(self) -> None:
        self._detach()
        callback, self._on_close = self._on_close, None
        if callback is not None:
            callback()

    def close(self) -> None:
        """Hang up, after what is queued as far as the other end takes it now, and without being told of it."""
        self._on_close = None
        self.channel.flush()
        self._detach()
        self.channel.close()
