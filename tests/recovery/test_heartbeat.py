"""The progress page is readable whatever its writer does."""

from __future__ import annotations

import os
import signal

import pytest

from recovery.heartbeat import CONTROL_SIZE, RECORD_SIZE, Beat, ControlReader, ControlWriter, HeartbeatReader, HeartbeatWriter
from recovery.memory import memfd


@pytest.fixture
def page():
    fd = memfd("heartbeat", 3 * RECORD_SIZE)
    yield fd
    os.close(fd)


def test_what_is_written_is_read(page):
    reader = HeartbeatReader(page)
    writer = HeartbeatWriter(page, 1, rank=5, attempt=2)
    assert reader.read(1) is None
    writer.beat("load")
    writer.beat("backward", step=41, microbatch=3, collective=17)
    writer.beat("optimizer")
    (beat,) = reader.beats()
    assert (beat.rank, beat.attempt, beat.step, beat.phase, beat.count) == (5, 2, 41, "optimizer", 3)
    assert (beat.microbatch, beat.collective) == (0, 17), "what was issued stays issued"
    assert 0.0 <= beat.age_s < 60.0
    writer.close()
    reader.close()


def test_before_the_first_step_the_step_is_minus_one(page):
    writer = HeartbeatWriter(page, 0, rank=0, attempt=0)
    writer.beat("load")
    reader = HeartbeatReader(page)
    assert reader.beats()[0].step == -1
    assert len(reader) == 3
    writer.close()
    reader.close()


def test_a_torn_record_is_not_believed(page):
    writer = HeartbeatWriter(page, 0, rank=0, attempt=0)
    writer.beat("forward", step=7)
    reader = HeartbeatReader(page)
    os.pwrite(page, b"\xff", 20)  # half a write
    assert reader.read(0) is None
    writer.beat("forward", step=8)
    beat = reader.read(0)
    assert beat is not None
    assert beat.step == 8
    writer.close()
    reader.close()


def test_long_phases_are_cut_to_fit(page):
    writer = HeartbeatWriter(page, 2, rank=2, attempt=0)
    writer.beat("x" * 500, step=1)
    reader = HeartbeatReader(page)
    beat = reader.read(2)
    assert beat is not None
    assert beat.phase == "x" * 40
    writer.close()
    reader.close()


@pytest.mark.dist
def test_a_reader_never_sees_a_mixture_while_the_writer_runs(page):
    child = os.fork()
    if child == 0:
        writer = HeartbeatWriter(page, 0, rank=0, attempt=0)
        number = 0
        while True:
            number += 1
            writer.beat(str(number), step=number, microbatch=number % 1000, collective=number)
    try:
        reader = HeartbeatReader(page)
        seen: set[int] = set()
        while len(seen) < 200:
            for beat in reader.beats():
                assert beat.phase == str(beat.step)
                assert (beat.microbatch, beat.collective, beat.count) == (beat.step % 1000, beat.step, beat.step)
                seen.add(beat.step)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        child = 0
        final = reader.beats()
        assert len(final) <= 1  # its last record may be torn, and is then not believed
        reader.close()
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_control_page():
    fd = memfd("control", CONTROL_SIZE)
    writer, reader = ControlWriter(fd), ControlReader(fd)
    assert (reader.stop, reader.save) == (False, 0)
    writer.set(stop=False, save=3)
    assert (reader.stop, reader.save) == (False, 3)
    writer.set(stop=True, save=3)
    assert (reader.stop, reader.save) == (True, 3)
    writer.close()
    reader.close()
    os.close(fd)


def test_a_beat_is_a_plain_record():
    assert Beat(rank=0, attempt=0, step=1, phase="x") == Beat(rank=0, attempt=0, step=1, phase="x")
