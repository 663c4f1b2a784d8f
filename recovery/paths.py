"""Where the files of a run lie in its local folder. One module, because five processes and the user look for them.

agent.json, agent.lock          the living agent of this node
agent-spec.json                 what it was started with
coordinator.sock                where agent and clients reach the coordinator
owner.json, owner.lock          the living coordinator (recovery.owner)
logs/agent.log, keeper.log, zygote.log, coordinator.log
logs/attempt-0007/rank-00003.log, rank-00003.error.json
"""

from __future__ import annotations

from pathlib import Path


def coordinator_socket(local_dir: Path) -> Path:
    """Where the coordinator listens."""
    return local_dir / "coordinator.sock"


def agent_record(local_dir: Path) -> Path:
    """Pid and start time of the agent."""
    return local_dir / "agent.json"


def agent_lock(local_dir: Path) -> Path:
    """Locked for as long as an agent lives."""
    return local_dir / "agent.lock"


def agent_spec(local_dir: Path) -> Path:
    """The specification an agent is started with."""
    return local_dir / "agent-spec.json"


def process_log(local_dir: Path, kind: str) -> Path:
    """Output of a process that is not bound to an attempt."""
    return local_dir / "logs" / f"{kind}.log"


def log_dir(local_dir: Path, attempt: int) -> Path:
    """Logs of one attempt."""
    return local_dir / "logs" / f"attempt-{attempt:04d}"


def rank_log(local_dir: Path, attempt: int, rank: int) -> Path:
    """Output of one worker."""
    return log_dir(local_dir, attempt) / f"rank-{rank:05d}.log"


def error_file(local_dir: Path, attempt: int, rank: int) -> Path:
    """The exception that ended a worker, as JSON."""
    return log_dir(local_dir, attempt) / f"rank-{rank:05d}.error.json"
