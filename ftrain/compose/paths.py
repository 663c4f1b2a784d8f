"""Where a run keeps what must be on a local disk: sockets, logs, the ledger's open segment, the resolved config.

<local>/config.json        the resolved config of the newest `ftrain run`
<local>/ledger/            closed and open segments; closed ones are copied to <run url>/ledger/
<local>/logs/              per attempt and rank
<local>/metrics.jsonl      one line per step, for plots
<local>/faults/            markers of injected faults that have fired
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from ftrain.config import Config
from ftrain.data.stdlib import cache_root
from ftrain.schemes import is_local

CONFIGURED = "launch.json"
SUPERVISED = "supervise.json"
"""What a local folder holds of the newest `ftrain run`, or `ftrain supervise`, there."""


def folder_of(url: str) -> Path:
    """The absolute path of a local place. `~` is the home folder; of nobody's (`~nobody/x`) it stays a name, as in a shell."""
    return Path(os.path.expanduser(url.removeprefix("file://"))).absolute()


def local_dir_of(url: str, override: str = "") -> Path:
    """The local folder of the run at `url`; `override` is run.local_dir."""
    if override:
        return folder_of(override)
    if is_local(url):
        return folder_of(url) / "local"
    return Path(cache_root()) / "runs" / hashlib.sha256(url.encode()).hexdigest()[:16]


def local_dir(config: Config) -> Path:
    """The local folder of a configured run."""
    return local_dir_of(config.run.url, config.run.local_dir)


def absolute_url(url: str) -> str:
    """A run's URL as every process must see it: local paths made absolute."""
    if is_local(url):
        return str(folder_of(url))
    scheme, _, place = url.partition("://")  # one without a place stays a URL, so that whoever opens it says what it lacks
    return f"{scheme}://{place.rstrip('/')}"
