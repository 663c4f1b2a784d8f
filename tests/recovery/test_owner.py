"""One coordinator per run; the dead do not hold it."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest

from recovery.launch import is_alive, start_time
from recovery.owner import HeldError, claim, read_owner, this_process

CLAIM = """
import sys
from pathlib import Path
from recovery.owner import claim
held = claim(Path(sys.argv[1]))
print(held.previous.pid if held.previous else "held", flush=True)
sys.stdin.read()
held.release()
print("let go", flush=True)
sys.stdin.read()
"""


def test_the_record_names_this_process(tmp_path):
    held = claim(tmp_path / "run")
    owner = read_owner(tmp_path / "run")
    assert owner == held.owner
    assert (owner.pid, owner.start_time) == (os.getpid(), start_time(os.getpid()))
    assert is_alive(owner.pid, owner.start_time)
    assert not is_alive(owner.pid, owner.start_time + 1)
    held.release()
    assert read_owner(tmp_path / "run") is None


def test_a_live_owner_is_named(tmp_path):
    held = claim(tmp_path)
    with pytest.raises(HeldError, match=f"process {os.getpid()} on .* `ftrain watch` shows it, `ftrain stop` ends it"):
        claim(tmp_path)
    held.release()
    claim(tmp_path).release()


@pytest.mark.chaos
def test_a_dead_owner_is_taken_over_at_once(tmp_path):
    other = subprocess.Popen([sys.executable, "-P", "-c", CLAIM, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout.readline() == b"held\n"
    with pytest.raises(HeldError, match=f"process {other.pid} on"):
        claim(tmp_path)
    other.kill()
    other.communicate()
    held = claim(tmp_path)
    assert held.previous is not None
    assert held.previous.pid == other.pid
    held.release()


def test_an_owner_on_another_host_is_not_guessed_about(tmp_path):
    stranger = msgspec.structs.replace(this_process(), host="another-host", pid=4711, job_id="99")
    (tmp_path / "owner.json").write_bytes(msgspec.json.encode(stranger))
    with pytest.raises(HeldError, match=r"process 4711 on another-host, job 99.*--take-over"):
        claim(tmp_path)
    held = claim(tmp_path, take_over=True)
    assert held.previous == stranger
    held.release()


def test_a_torn_record_is_no_obstacle(tmp_path):
    (tmp_path / "owner.json").write_bytes(b'{"host": "x"')
    claim(tmp_path).release()


@pytest.mark.chaos
def test_a_start_hands_the_run_to_its_coordinator_with_nobody_in_between(tmp_path):
    """From the parent's claim on, through the death of a coordinator and the start of the next one, to that one's end."""

    def coordinator():
        fds, env = held.hand_over()
        command = [sys.executable, "-P", "-c", CLAIM, str(tmp_path)]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, pass_fds=fds, env={**os.environ, **env})

    held = claim(tmp_path)
    with pytest.raises(HeldError, match=f"process {os.getpid()} on"):
        claim(tmp_path)
    first = coordinator()
    assert first.stdout.readline() == b"held\n", "its parent has run nothing, and is nobody's predecessor"
    with pytest.raises(HeldError, match=f"process {first.pid} on"):
        claim(tmp_path)
    first.kill()
    first.communicate()
    with pytest.raises(HeldError):
        claim(tmp_path)
    second = coordinator()
    assert second.stdout.readline() == b"%d\n" % first.pid
    held.release()
    with pytest.raises(HeldError, match=f"process {second.pid} on"):
        claim(tmp_path)  # its parent may go
    second.kill()
    second.communicate()
    claim(tmp_path).release()


@pytest.mark.chaos
def test_a_coordinator_that_ends_lets_go_of_the_run_for_its_parent_too(tmp_path):
    held = claim(tmp_path)
    fds, env = held.hand_over()
    command = [sys.executable, "-P", "-c", CLAIM.replace("sys.stdin.read()", "sys.stdin.readline()"), str(tmp_path)]
    pipe = subprocess.PIPE
    child = subprocess.Popen(command, stdin=pipe, stdout=pipe, pass_fds=fds, env={**os.environ, **env})
    assert child.stdout.readline() == b"held\n"
    child.stdin.write(b"\n")
    child.stdin.flush()
    assert child.stdout.readline() == b"let go\n"
    claim(tmp_path).release()
    child.communicate(b"\n")
    held.release()
