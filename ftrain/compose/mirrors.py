"""Whether a run may keep its copies where its config says, asked before the first of them is made."""

from __future__ import annotations

from typing import Any

import msgspec

from ftrain.compose.errors import RefusedError
from ftrain.compose.paths import absolute_url
from ftrain.compose.stores import open_configured
from ftrain.config import Config
from storage.belongs import no_mirror_of
from storage.errors import StorageError
from storage.objects import check_store
from storage.run import RunStore

ANOTHER = "give checkpoint.mirror_url another place"


def check_mirror(config: Config, *, begun: bool, origin: str = "") -> None:
    """Raises RefusedError if somebody else's checkpoints are in the mirror, or those of an earlier run of this place, which
    may be the last there are. `begun`: the run has a checkpoint; `origin`: the URL that it is to begin from.

    A mirror that cannot be reached holds up nobody.
    """
    if why := trouble(config, begun=begun, origin=origin):
        raise RefusedError([why])


def trouble(config: Config, *, begun: bool, origin: str = "") -> str:
    """What speaks against the mirror, and what to do; empty if nothing does, or nobody can say."""
    url = config.checkpoint.mirror_url
    if not url:
        return ""
    if absolute_url(url) == absolute_url(config.run.url):
        return f"checkpoint.mirror_url is the run's own place, {url}: a copy there is none; {ANOTHER}"
    try:
        run, mirror = open_configured(config.storage, config.run.url), open_configured(config.storage, url).quick()
        try:
            if why := no_mirror_of(run, mirror):
                return f"{why}; {ANOTHER}"
            brought_back = bool(origin) and absolute_url(origin) == absolute_url(url)
            if not begun and not brought_back and RunStore(mirror).checkpoints():
                again = f"bring it back (`ftrain ckpt cp {url} {config.run.url}`, or begin with `--from {url}`)"
                return f"{url} holds copies of a run that is not at {config.run.url} any more: {again}, or {ANOTHER}"
        finally:
            run.close()
            mirror.close()
    except StorageError:
        return ""
    return ""


def probe(config: dict[str, Any]) -> str:
    """For `ftrain doctor`: copies can be written there, and nobody else's checkpoints are in the way."""
    wanted = msgspec.convert(config, Config)
    url = wanted.checkpoint.mirror_url
    opened = open_configured(wanted.storage, url).quick()
    try:
        check_store(opened)
    finally:
        opened.close()
    run = open_configured(wanted.storage, wanted.run.url)
    try:
        begun = bool(RunStore(run).checkpoints())
    finally:
        run.close()
    check_mirror(wanted, begun=begun)
    return f"{url}: written, read back, deleted; nobody else's checkpoints are there"
