"""Where a run and its storage meet: one owner on any host, the alarm for stale snapshots, tiers, options of the config."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from ftrain.checkpoint.messages import PackStored
from ftrain.compose.committer import Committer, Job, Outcome
from ftrain.compose.holder import Holder, check_holder
from ftrain.compose.places import Places
from ftrain.compose.skips import ranges
from ftrain.compose.stores import local_tier_url, open_known, store_options
from ftrain.compose.tiers import LocalTier, mirror_checkpoint
from ftrain.config import Storage
from ftrain.load import load
from recovery.events import CheckpointCommitted, CheckpointFailed, StorageNotice, TierCommitted
from recovery.owner import HeldError, this_process
from storage.epoch import read_epochs
from storage.heal import heal
from storage.keys import pack_name, step_folder
from storage.lease import read_holder, renew
from storage.memory import MemoryStore
from storage.objects import ObjectStore, open_store
from storage.retention import KeepLast, RetentionPolicy
from storage.run import RunStore
from storage.s3 import S3Options
from tests.storage.building import SPECS, build_pack, deal, random_values, save
from tests.storage.crashing import ClockStore

CONFIG = Path(__file__).parents[3] / "configs" / "tiny-dp2.toml"
HERE = this_process()
ELSEWHERE = msgspec.structs.replace(HERE, host="node-b", pid=77)
VALUES, OTHER = random_values(SPECS, 1), random_values(SPECS, 2)


def hold(store: ObjectStore, owner: object, epoch: int = 0) -> None:
    renew(store, epoch=epoch, owner=msgspec.to_builtins(owner), lease_s=60.0)


def test_a_live_owner_on_another_host_is_named_until_its_lease_is_over() -> None:
    store = ClockStore()
    check_holder(store, take_over=False)
    hold(store, ELSEWHERE)
    store.now += 50
    with pytest.raises(HeldError, match=r"process 77 on node-b.*50 s ago.*wait 10 s.*--take-over"):
        check_holder(store, take_over=False)
    check_holder(store, take_over=True)
    store.now += 11
    check_holder(store, take_over=False)


def test_on_this_host_a_dead_owner_is_replaced_at_once_and_a_live_one_is_named() -> None:
    store = ClockStore()
    hold(store, HERE)
    with pytest.raises(HeldError, match=f"process {HERE.pid} on {HERE.host}"):
        check_holder(store, take_over=False)
    hold(store, msgspec.structs.replace(HERE, start_time=HERE.start_time + 1))  # the number was given to another process
    check_holder(store, take_over=False)
    hold(store, msgspec.structs.replace(HERE, boot_id="before the last boot"))
    check_holder(store, take_over=False)


def test_a_copy_of_a_live_run_is_said_to_be_one(tmp_path: Path) -> None:
    """Its lease names the run that it was taken for; when that is over the copy is as good as any run."""
    live, copy = tmp_path / "live", tmp_path / "copy"
    holder = Holder(open_store(str(live)), epoch=0, lease_s=60.0)
    shutil.copytree(live, copy)
    with pytest.raises(HeldError, match=f"{copy} is a copy of .*{live}, made while that was running, by process {HERE.pid}"):
        check_holder(open_store(str(copy)), take_over=False)
    with pytest.raises(HeldError, match=f"{live} is held by process {HERE.pid}"):
        check_holder(open_store(str(live)), take_over=False)
    (tmp_path / "link").symlink_to(live)
    with pytest.raises(HeldError, match=f"link is held by process {HERE.pid}"):
        check_holder(open_store(str(tmp_path / "link")), take_over=False)
    holder.close()


def test_the_holder_lets_go_at_its_end_and_notices_a_take_over() -> None:
    store = ClockStore()
    holder = Holder(store, epoch=3, lease_s=60.0)
    with pytest.raises(HeldError):
        check_holder(store, take_over=False)
    holder.close()
    check_holder(store, take_over=False)
    zombie = Holder(store, epoch=4, lease_s=60.0)
    hold(store, ELSEWHERE, epoch=5)
    zombie._renew()
    assert "node-b" in zombie.taken_by
    zombie.close()
    held = read_holder(store)
    assert held is not None
    assert (held.record.epoch, held.over) == (5, False), "the zombie did not let go for the new owner"


def parts(  # type: ignore[type-arg]
    store: ObjectStore, values: dict, step: int, epoch: int, *, bad_since: int | None = None
) -> tuple[PackStored, ...]:
    found = []
    hands = deal(SPECS, 2)
    for rank, boxes in enumerate(hands):
        data, manifest = build_pack(SPECS, values, boxes, pack_name(epoch, 0, rank))
        store.put(RunStore(store).pack_key(step, epoch, 0, rank), data)
        found.append(
            PackStored(
                epoch=epoch,
                attempt=0,
                step=step,
                rank=rank,
                world=len(hands),
                manifest=manifest,
                progress={"taken_s": 1234.5, "bad_since": bad_since},
                seconds=0.1,
                retries=2,
            )
        )
    return tuple(found)


class Committing:
    """A committer, and what it says to one job after the other."""

    def __init__(
        self,
        store: ObjectStore,
        policies: Sequence[RetentionPolicy] = (),
        *,
        grace_s: float = 0.0,
        writers: Callable[[], frozenset[tuple[int, int]]] = frozenset,
    ) -> None:
        self.store, self.run = store, RunStore(store)
        self.epoch = self.run.take_epoch(owner={})
        self.done = threading.Semaphore(0)
        self.committer = Committer(self.run, policies, grace_s=grace_s, wake=self.done.release, writers=writers)

    def valid(self) -> list[int]:
        """The steps that count once all is done that was asked for."""
        self.committer.close()
        return [info.step for info in self.run.checkpoints() if info.state == "valid"]

    def packs(self) -> list[int]:
        """The steps of which there are packs."""
        return sorted(
            {int(info.key.split("/")[1][5:]) for info in self.store.list("checkpoints/") if info.key.endswith(".pack")}
        )

    def commit(  # type: ignore[type-arg]
        self, values: dict, step: int, *, changed: bool, bad_since: int | None = None
    ) -> Outcome:
        made = parts(self.store, values, step, self.epoch, bad_since=bad_since)
        self.committer.submit(Job(epoch=self.epoch, attempt=0, step=step, parts=made, begin=0.0, changed=changed))
        assert self.done.acquire(timeout=30)
        (outcome,) = self.committer.results()
        return outcome


def test_a_stale_snapshot_raises_the_alarm_and_is_not_committed() -> None:
    committing = Committing(MemoryStore())
    assert committing.commit(VALUES, 10, changed=True).committed
    stale = committing.commit(VALUES, 20, changed=True)
    assert not stale.committed
    alarm, failure = stale.events
    assert isinstance(alarm, StorageNotice)
    assert isinstance(failure, CheckpointFailed)
    assert (alarm.topic, alarm.step, failure.step) == ("stale", 20, 20)
    assert "bit for bit" in alarm.text
    assert committing.commit(VALUES, 30, changed=False).committed, "no update was applied: equal is right"
    assert committing.commit(OTHER, 40, changed=True).committed
    committing.epoch = committing.run.take_epoch(owner={}, starts_from=40)
    assert committing.commit(OTHER, 50, changed=True).committed, "after a roll-back it may equal what was given up"
    assert [info.step for info in committing.run.checkpoints() if info.state == "valid"] == [10, 30, 40, 50]
    committing.committer.close()


@pytest.mark.parametrize(("after", "valid"), [((), [10, 20, 30]), ((40,), [40])])
def test_while_losses_are_bad_nothing_before_they_became_so_is_collected(after: tuple[int, ...], valid: list[int]) -> None:
    """If they stay bad, that is where the run goes back to; if not, it is collected with the next commit."""
    committing = Committing(MemoryStore())
    for step in (10, 20):
        assert committing.commit(VALUES, step, changed=False).committed
    committing.committer._policies = [KeepLast(1)]
    for step, since in ((30, 29), *((step, None) for step in after)):
        assert committing.commit(VALUES, step, changed=False, bad_since=since).committed
    assert committing.valid() == valid


@pytest.mark.parametrize(("spared", "valid"), [(20, [10, 20, 30]), (None, [30])])
def test_what_workers_are_about_to_load_is_not_collected(spared: int | None, valid: list[int]) -> None:
    committing = Committing(MemoryStore())
    for step in (10, 20):
        assert committing.commit(VALUES, step, changed=False).committed
    committing.committer._policies = [KeepLast(1)]
    committing.committer.spare(spared)
    assert committing.commit(VALUES, 30, changed=False).committed
    assert committing.valid() == valid


def test_retries_of_the_writers_stand_in_the_commit() -> None:
    committing = Committing(MemoryStore())
    (event,) = committing.commit(VALUES, 10, changed=True).events
    assert isinstance(event, CheckpointCommitted)
    assert event.retries == 4
    committing.committer.close()


def local_tier(folder: Path, store: ObjectStore | None = None) -> tuple[LocalTier, threading.Semaphore]:
    done = threading.Semaphore(0)
    return LocalTier(str(folder), done.release, store or MemoryStore()), done


def write_local(tier: LocalTier, done: threading.Semaphore, values: dict, step: int, epoch: int) -> None:  # type: ignore[type-arg]
    for part in parts(tier._run.store, values, step, epoch):
        assert tier.on_keeper(msgspec.structs.replace(part, tier="local")) == []
    assert done.acquire(timeout=30)
    (event,) = tier.results()
    assert isinstance(event, TierCommitted)
    assert event.step == step


def test_the_local_tier_keeps_two_and_follows_the_history_of_the_run(tmp_path: Path) -> None:
    run = RunStore(MemoryStore())
    before = read_epochs(run.store)
    tier, done = local_tier(tmp_path)
    tier.begin(run.take_epoch(owner={}), before, None)
    assert tier.step is None
    for step in (10, 20, 30):
        write_local(tier, done, VALUES, step, 0)
    tier.close()
    assert [info.step for info in tier._run.checkpoints() if info.state == "valid"] == [20, 30]
    save(run, OTHER, step=10, epoch=0)
    for _ in range(3):  # coordinators come and go without a commit: the newest stays
        before = read_epochs(run.store)
        epoch = run.take_epoch(owner={})
        tier, done = local_tier(tmp_path)
        tier.begin(epoch, before, 10)
        assert tier.step == 30
        tier.close()
    tier, done = local_tier(tmp_path)
    before = read_epochs(run.store)
    epoch = run.take_epoch(owner={}, starts_from=10)
    tier.begin(epoch, before, 10)
    tier.rolled_back(epoch, 20)
    assert tier.step == 20
    write_local(tier, done, OTHER, 30, epoch)
    assert tier.step == 30
    tier.close()


@pytest.mark.parametrize("first", ["local", "storage"])
def test_commit_and_manifest_of_the_run_come_back_from_the_local_tier(tmp_path: Path, first: str) -> None:
    """Whichever of the two commits a step first: each takes its own time."""
    committing = Committing(ClockStore())
    run = committing.run
    tier, done = local_tier(tmp_path, run.store)
    tier.begin(committing.epoch, read_epochs(MemoryStore()), None)
    for step in (10, 20) if first == "local" else (20,):
        write_local(tier, done, VALUES, step, committing.epoch)
    assert committing.commit(VALUES, 20, changed=True).committed
    if first == "storage":
        write_local(tier, done, VALUES, 20, committing.epoch)
    tier.committed(20)
    tier._twins.shutdown(wait=True)
    keys = [info.key for info in run.store.list(step_folder(20)) if info.key.endswith((".manifest", "commit-e0000.json"))]
    before = {key: run.store.get(key) for key in keys}
    assert len(before) == 2
    for key in keys:
        run.store.put(key, b"damaged")
    heal(run.store, 20, [tier._run.open(20)])
    assert {key: run.store.get(key) for key in keys} == before
    committing.committer.close()
    tier.close()


def test_what_was_committed_just_before_the_run_went_back_does_not_count(tmp_path: Path) -> None:
    run = RunStore(MemoryStore())
    tier, done = local_tier(tmp_path)
    tier.begin(run.take_epoch(owner={}), read_epochs(MemoryStore()), None)
    write_local(tier, done, VALUES, 10, 0)
    for part in parts(tier._run.store, OTHER, 30, 0):
        tier.on_keeper(msgspec.structs.replace(part, tier="local"))
    assert done.acquire(timeout=30)  # committed, and not told yet
    places = Places(load(str(CONFIG)), run, [])
    places._local = tier
    assert places.rolled_back(1, 10) == []
    tier.results()
    assert tier.step == 10
    tier.close()


@pytest.mark.parametrize(("first", "step"), [(15, None), (30, None), (31, 30)])
def test_a_local_state_that_has_read_what_is_to_be_passed_over_is_given_up(
    tmp_path: Path, first: int, step: int | None
) -> None:
    """Whether the run's storage has come as far or not: it is the newest state anywhere, and the workers would take it."""
    overrides = [f"data.skip=[{{first={first}, last=40}}]", f'checkpoint.local_url="{tmp_path}"']
    config = load(str(CONFIG), [*overrides, "checkpoint.local_every_steps=5"])
    run = RunStore(MemoryStore())
    tier, done = local_tier(Path(local_tier_url(config)))
    tier.begin(run.take_epoch(owner={}), read_epochs(MemoryStore()), None)
    write_local(tier, done, VALUES, 30, 0)
    tier.close()
    before, epoch = read_epochs(run.store), run.take_epoch(owner={})
    places = Places(config, run, [])
    assert places.begin(epoch, before, None, lambda: None) == []
    assert places.pass_over(ranges(config, ()), epoch, None) == []
    assert places.local_step == step
    places.close()


def test_what_a_coordinator_on_another_machine_gave_up_is_given_up_here_too(tmp_path: Path) -> None:
    run = RunStore(MemoryStore())
    tier, done = local_tier(tmp_path)
    tier.begin(run.take_epoch(owner={}), read_epochs(MemoryStore()), None)
    write_local(tier, done, VALUES, 30, 0)
    tier.close()
    save(run, OTHER, step=20, epoch=0)
    save(run, OTHER, step=40, epoch=run.take_epoch(owner={"host": "another"}))
    before = read_epochs(run.store)
    tier, _ = local_tier(tmp_path)
    tier.begin(run.take_epoch(owner={}), before, 40)
    assert tier.step is None, "step 30 is of a history that went another way from step 20 on"
    tier.close()


def test_a_tier_of_an_earlier_life_of_the_run_is_emptied(tmp_path: Path) -> None:
    tier, done = local_tier(tmp_path)
    tier.begin(5, read_epochs(MemoryStore()), None)
    write_local(tier, done, VALUES, 30, 5)
    tier.close()
    tier, _ = local_tier(tmp_path)
    tier.begin(0, read_epochs(MemoryStore()), None)
    assert tier.step is None
    assert [info.key for info in tier._run.store.list("checkpoints/")] == []
    tier.close()


def test_a_mirror_goes_back_with_the_run() -> None:
    run, mirror = RunStore(MemoryStore()), RunStore(MemoryStore())
    epoch = run.take_epoch(owner={})
    for step in (10, 20, 30):
        save(run, VALUES, step=step, epoch=epoch)
        assert mirror_checkpoint(run, mirror, step) > 0
    assert mirror_checkpoint(run, mirror, 30) > 0, "again is fine"
    epoch = run.take_epoch(owner={}, starts_from=10)
    save(run, OTHER, step=20, epoch=epoch)
    mirror_checkpoint(run, mirror, 20)
    assert {info.step: str(info.state) for info in mirror.checkpoints()} == {10: "valid", 20: "valid", 30: "fenced"}
    assert mirror.open().manifest.digests == run.open().manifest.digests
    assert mirror.open().verify().ok


def test_the_storage_section_says_what_the_store_is_given() -> None:
    storage = Storage(
        endpoint="http://s3.example:9000",
        region="eu",
        profile="train",
        ca_bundle="/etc/ca.pem",
        proxy="http://proxy:3128",
        addressing="path",
        sse="aws:kms",
        sse_kms_key_id="k",
        backend="s3fs",
    )
    options = store_options(storage, "s3://bucket/run")
    assert options.pop("backend") == "s3fs"
    parsed = S3Options.parse("s3://bucket/run", options)
    assert (parsed.endpoint_url, parsed.region, parsed.profile, parsed.ca_bundle) == (
        "http://s3.example:9000",
        "eu",
        "train",
        "/etc/ca.pem",
    )
    assert parsed.s3_additional_kwargs == {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "k"}
    assert parsed.config_kwargs["proxies"] == {"http": "http://proxy:3128", "https": "http://proxy:3128"}
    assert parsed.config_kwargs["s3"] == {"addressing_style": "path"}
    assert store_options(storage, "/a/folder") == {}
    assert store_options(storage, "sftp://host/x") == {}
    assert "endpoint_url" not in store_options(Storage(), "s3://bucket/run"), "the environment decides"


def test_a_store_of_a_run_that_is_not_known_here_is_opened_by_its_url(tmp_path: Path) -> None:
    store = open_known(str(tmp_path / "run"))
    assert list(store.list()) == []
