"""Values that are each legal and together impossible, all of them listed, each with the nearest legal ones.

The anchors (Megatron, torchtitan, DeepSpeed) stop at the first failed assert, often on rank 300 after ten minutes. Here the
checks are one pure function of the config, so the command line, the planner's search and the tests ask the same question.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import gcd

from ftrain.config import Config, KeepBest
from ftrain.nearest import around, divisors, multiple_or_divisor, nearest, nearest_divisor, nearest_of
from ftrain.parallel.partition import partition_layers
from ftrain.schema import Problem
from ftrain.schemes import SUPPORTED, is_local, why_not

BYTE_VOCAB = 257
"""256 byte values and the end-of-document token."""

_AXES = ("tp", "cp", "pp", "dp")


def combinations(config: Config) -> list[Problem]:
    """All impossible combinations of a config whose single values are legal."""
    return [problem for rule in RULES for problem in rule(config)]


def replicas(config: Config) -> int:
    """The DP size: what remains of the ranks. Meaningful only if the ranks divide."""
    parallel = config.parallel
    return parallel.ranks // (parallel.tp * parallel.cp * parallel.pp)


def num_chunks(config: Config) -> int:
    """Stages of a pipeline rank; the V always has two."""
    return 2 if config.parallel.schedule == "zb_v" else config.parallel.virtual_stages


def head_dim(config: Config) -> int:
    """The size of a head, derived from the width unless given."""
    return config.model.head_dim or config.model.hidden // config.model.heads


def kv_heads(config: Config) -> int:
    """The number of key/value heads, as many as query heads unless given."""
    return config.model.kv_heads or config.model.heads


def _ranks(config: Config) -> Iterator[Problem]:
    parallel = config.parallel
    unit = parallel.tp * parallel.cp * parallel.pp
    if parallel.ranks % unit:
        given = f"given {parallel.ranks}, with tp x cp x pp = {parallel.tp} x {parallel.cp} x {parallel.pp} = {unit}"
        yield Problem("parallel.ranks", given, f"a multiple of {unit}", nearest(parallel.ranks, multiple_of=unit))


def _order(config: Config) -> Iterator[Problem]:
    order = config.parallel.order
    if sorted(order) != sorted(_AXES):
        yield Problem("parallel.order", f"given {list(order)}", "each of tp, cp, pp, dp exactly once")


def _heads(config: Config) -> Iterator[Problem]:
    model, tp = config.model, config.parallel.tp
    if model.heads % tp:
        given = f"given {tp}, with model.heads = {model.heads}"
        yield Problem("parallel.tp", given, "a divisor of model.heads", nearest_divisor(tp, model.heads))
    num_kv = kv_heads(config)
    if model.heads % num_kv:
        given = f"given {num_kv}, with model.heads = {model.heads}"
        yield Problem("model.kv_heads", given, "a divisor of model.heads", nearest_divisor(num_kv, model.heads))
    if num_kv % tp and tp % num_kv:
        given = f"given {tp}, with model.kv_heads = {num_kv}"
        yield Problem("parallel.tp", given, "a multiple or a divisor of model.kv_heads", multiple_or_divisor(tp, num_kv))


def _width(config: Config) -> Iterator[Problem]:
    model = config.model
    if not model.head_dim and model.hidden % model.heads:
        given = f"given {model.hidden}, with model.heads = {model.heads} and no model.head_dim"
        hint = nearest(model.hidden, multiple_of=model.heads) + ", or give model.head_dim"
        yield Problem("model.hidden", given, "a multiple of model.heads", hint)
    elif head_dim(config) % 2:
        path = "model.head_dim" if model.head_dim else "model.hidden"
        allowed = "an even head size: rotary positions turn pairs"
        yield Problem(path, f"given a head size of {head_dim(config)}", allowed, nearest(head_dim(config), multiple_of=2))
    if model.ffn % config.parallel.tp:
        given = f"given {model.ffn}, with parallel.tp = {config.parallel.tp}"
        yield Problem("model.ffn", given, "a multiple of parallel.tp", nearest(model.ffn, multiple_of=config.parallel.tp))


def _stages(config: Config) -> Iterator[Problem]:
    layers, pp, chunks = config.model.layers, config.parallel.pp, num_chunks(config)
    if pp * chunks > layers:
        each = f" and {chunks} stages on each rank" if chunks > 1 else ""
        given = f"given {pp}, with model.layers = {layers}{each}"
        legal = layers // chunks
        hint = f"nearest: {legal}" if legal else f'nearest: model.layers = {pp * chunks}, or parallel.schedule = "1f1b"'
        yield Problem("parallel.pp", given, "at most one stage per layer", hint)


def _virtual_stages(config: Config) -> Iterator[Problem]:
    parallel = config.parallel
    given = f'given {parallel.virtual_stages}, with parallel.schedule = "{parallel.schedule}"'
    if parallel.schedule == "interleaved":
        if parallel.virtual_stages < 2:
            yield Problem("parallel.virtual_stages", given, "at least 2 (with 1 it is 1f1b)", "nearest: 2")
        if parallel.pp < 2:
            given = 'given 1, with parallel.schedule = "interleaved"'
            yield Problem("parallel.pp", given, "at least 2: one rank has nothing to interleave", "nearest: 2")
    elif parallel.virtual_stages > 1 and parallel.schedule != "zb_v":
        yield Problem("parallel.virtual_stages", given, "1, or schedule interleaved", "nearest: 1")
    elif parallel.virtual_stages > 2:
        yield Problem("parallel.virtual_stages", given, "1 or 2: the V has two stages on each rank", "nearest: 2")


def _layer_counts(config: Config) -> Iterator[Problem]:
    counts, layers = config.parallel.layer_counts, config.model.layers
    stages = config.parallel.pp * num_chunks(config)
    if counts and (len(counts) != stages or sum(counts) != layers or min(counts) < 1):
        given = f"given {list(counts)}: {len(counts)} stages, {sum(counts)} layers"
        allowed = f"{stages} numbers, each at least 1, that add up to model.layers = {layers}"
        even = [len(part) for part in partition_layers(layers, stages)] if stages <= layers else []
        yield Problem("parallel.layer_counts", given, allowed, f"nearest: {even}" if even else "")


def _sizes(config: Config) -> Iterator[tuple[str, int]]:
    """Every number of sequences that an update may take, and where it is said."""
    yield "batch.global_batch", config.batch.global_batch
    yield from ((f"batch.ramp.{index}.global_batch", part.global_batch) for index, part in enumerate(config.batch.ramp))


def _groups(config: Config) -> Iterator[Problem]:
    parallel, micro = config.parallel, config.batch.micro_batch
    unit = replicas(config) * parallel.pp
    if parallel.schedule != "interleaved" or parallel.pp == 1 or not unit:
        return
    for path, size in _sizes(config):
        if size % micro == 0 and size // micro % unit:
            given = f"given {size}: {size // micro} micro-batches over {replicas(config)} replicas of {parallel.pp} stages"
            allowed = "interleaved: each replica's micro-batches a multiple of parallel.pp"
            yield Problem(path, given, allowed, nearest(size, multiple_of=unit * micro))


def _sequence(config: Config) -> Iterator[Problem]:
    seq, cp = config.data.seq_len, config.parallel.cp
    tp = config.parallel.tp if config.parallel.sp else 1
    if cp > 1 and seq % (2 * cp):
        given = f"given {seq}, with parallel.cp = {cp}"
        yield Problem(
            "data.seq_len", given, f"a multiple of 2 x cp = {2 * cp} (head and tail pieces)", nearest(seq, multiple_of=2 * cp)
        )
    elif seq % (tp * cp):
        given = f"given {seq}, with parallel.tp = {tp} and parallel.cp = {cp}"
        allowed = f"a multiple of tp x cp = {tp * cp} (sequence parallelism cuts along the sequence)"
        hint = nearest(seq, multiple_of=2 * cp * tp if cp > 1 else tp) + ", or parallel.sp = false"
        yield Problem("data.seq_len", given, allowed, hint)


def _fsdp(config: Config) -> Iterator[Problem]:
    parallel, dp = config.parallel, max(1, replicas(config))
    given = f'given "{parallel.sharding}"'
    if parallel.sharding == "zero1":
        return
    if dp * parallel.cp == 1:
        yield Problem(
            "parallel.sharding", f"{given}, with one replica", "zero1: there is nobody to share with", "nearest: zero1"
        )
    if parallel.schedule.startswith("zb_"):
        allowed = "zero1: FSDP sums gradients behind each backward, zero bubble makes those of weights later"
        yield Problem(
            "parallel.sharding", f'{given}, with parallel.schedule = "{parallel.schedule}"', allowed, "nearest: zero1"
        )
    if config.model.tied and parallel.pp > 1:
        allowed = "zero1, or an untied head: the two ends of a pipeline would each cut the embedding"
        yield Problem(
            "parallel.sharding", f"{given}, with model.tied and parallel.pp = {parallel.pp}", allowed, "nearest: zero1"
        )
    for name in ("overlap_reduce", "overlap_gather"):
        if getattr(parallel, name):
            allowed = "false with fsdp, hsdp and hfsdp, whose collectives overlap by themselves"
            yield Problem(f"parallel.{name}", f"given true, with sharding = {given[6:]}", allowed, "nearest: false")
    for path, size in _even(config):
        unit = config.batch.micro_batch * dp
        if size % unit:
            allowed = f"a multiple of micro_batch x replicas = {unit}: with FSDP all replicas gather equally often"
            yield Problem(path, f"given {size}, with {given[6:]}", allowed, nearest(size, multiple_of=unit))


def _even(config: Config) -> Iterator[tuple[str, int]]:
    """Every number of sequences of which replicas that work in step need equal shares."""
    yield from _sizes(config)
    if config.evaluate.every_steps:
        yield "evaluate.sequences", config.evaluate.sequences


def _fsdp_groups(config: Config) -> Iterator[Problem]:
    parallel, shards = config.parallel, max(1, replicas(config)) * config.parallel.cp
    given = f'given {parallel.fsdp_inner}, with sharding = "{parallel.sharding}" of {shards} replicas'
    if parallel.sharding not in ("hsdp", "hfsdp"):
        if parallel.fsdp_inner != 1:
            yield Problem("parallel.fsdp_inner", given, "1 (it has no effect elsewhere), or hsdp or hfsdp", "nearest: 1")
    elif shards % parallel.fsdp_inner or not 1 < parallel.fsdp_inner < shards:
        legal = divisors(shards)[1:-1]
        hint = nearest_of(around(parallel.fsdp_inner, legal)) if legal else 'nearest: parallel.sharding = "fsdp"'
        yield Problem("parallel.fsdp_inner", given, "a divisor of the replicas, neither 1 nor all", hint)


def _experts(config: Config) -> Iterator[Problem]:
    model, parallel = config.model, config.parallel
    if not model.experts:
        if parallel.ep > 1:
            given = f"given {parallel.ep}, with model.experts = 0"
            yield Problem("parallel.ep", given, "1: a dense model has no experts to share out", "nearest: 1")
        return
    if model.experts_per_token > model.experts:
        given = f"given {model.experts_per_token}, with model.experts = {model.experts}"
        yield Problem("model.experts_per_token", given, "at most model.experts", f"nearest: {model.experts}")
    if parallel.sharding != "zero1":
        given = f'given "{parallel.sharding}", with model.experts = {model.experts}'
        yield Problem("parallel.sharding", given, "zero1: FSDP does not share out experts", "nearest: zero1")


def _expert_groups(config: Config) -> Iterator[Problem]:
    experts, ep = config.model.experts, config.parallel.ep
    if not experts or ep == 1:
        return
    dp, cp = max(1, replicas(config)), config.parallel.cp
    common = gcd(experts, dp * cp)
    legal = divisors(common)
    hint = nearest_of(around(ep, legal))
    if experts % ep:
        yield Problem("parallel.ep", f"given {ep}, with model.experts = {experts}", "a divisor of model.experts", hint)
    if dp * cp % ep:
        given = f"given {ep}, with dp x cp = {dp} x {cp}"
        yield Problem("parallel.ep", given, "a divisor of dp x cp: experts are shared out among replicas", hint)
    for path, size in _even(config):
        unit = config.batch.micro_batch * dp
        if size % unit:
            allowed = f"a multiple of micro_batch x replicas = {unit}: replicas that share experts take equal shares"
            yield Problem(path, f"given {size}, with parallel.ep = {ep}", allowed, nearest(size, multiple_of=unit))


def _documents(config: Config) -> Iterator[Problem]:
    if config.data.document_mask and not config.data.isolate_documents:
        allowed = "only with data.isolate_documents = true: what attention cannot see cannot be learned from"
        yield Problem("data.document_mask", "given true, with data.isolate_documents = false", allowed)


def _batch(config: Config) -> Iterator[Problem]:
    micro, dp = config.batch.micro_batch, max(1, replicas(config))
    for path, size in _sizes(config):
        if size % micro:
            given = f"given {micro}, with {path} = {size}"
            yield Problem("batch.micro_batch", given, f"a divisor of {path}", nearest_divisor(micro, size))
        elif size // micro < dp:
            given = f"given {size}: {size // micro} micro-batches of {micro}"
            yield Problem(path, given, f"at least one micro-batch for each of the {dp} replicas", f"nearest: {dp * micro}")


def _ramp(config: Config) -> Iterator[Problem]:
    before = 0
    for index, part in enumerate(config.batch.ramp):
        if part.tokens <= before:
            given = f"given {part.tokens}, after {before}"
            yield Problem(f"batch.ramp.{index}.tokens", given, "more than the part before (tokens of the run)")
        before = max(before, part.tokens)


def _profile_steps(config: Config) -> Iterator[Problem]:
    steps = config.machine.profile_steps
    if steps and (len(steps) != 2 or not 1 <= steps[0] <= steps[1]):
        given, allowed = f"given {list(steps)}", "[first, last] with 1 <= first <= last, or [] for none"
        yield Problem("machine.profile_steps", given, allowed, f"nearest: [{max(1, steps[0])}, {max(1, *steps)}]")
    elif steps and steps[1] > config.run.steps:
        given = f"given {list(steps)}, with run.steps = {config.run.steps}"
        last = config.run.steps
        hint = f"nearest: [{min(steps[0], last)}, {last}], or more run.steps"
        yield Problem("machine.profile_steps", given, "steps of the run: none is traced behind its last", hint)


def _schedule(config: Config) -> Iterator[Problem]:
    schedule, steps = config.schedule, config.run.steps
    if schedule.decay_steps and schedule.kind != "wsd":
        allowed = 'only with schedule.kind = "wsd" (it has no effect elsewhere)'
        yield Problem("schedule.decay_steps", f'given {schedule.decay_steps}, with kind = "{schedule.kind}"', allowed)
    elif schedule.warmup_steps + schedule.decay_steps > steps:
        given = f"given {schedule.warmup_steps}, with decay_steps = {schedule.decay_steps} and run.steps = {steps}"
        hint = f"nearest: {max(0, steps - schedule.decay_steps)}"
        yield Problem("schedule.warmup_steps", given, "warm-up and decay within run.steps", hint)


def _intervals(config: Config) -> Iterator[Problem]:
    checkpoint = config.checkpoint
    every, snapshot = checkpoint.every_steps, checkpoint.snapshot_steps
    if 0 < every < snapshot:
        given = f"given {snapshot}, with checkpoint.every_steps = {every}"
        allowed = "at most checkpoint.every_steps (what goes to storage is a snapshot as well), or 0"
        yield Problem("checkpoint.snapshot_steps", given, allowed, f"nearest: {every}")
    if checkpoint.peer_copy and not (config.machine.ranks_per_node and checkpoint.slots == 3 and checkpoint.snapshot_steps):
        given = (
            f"given true, with machine.ranks_per_node = {config.machine.ranks_per_node}, "
            f"checkpoint.slots = {checkpoint.slots}, checkpoint.snapshot_steps = {snapshot}"
        )
        allowed = "several nodes (ranks_per_node above 0), 3 slots (one stays as long as the copies are of its step), snapshots"
        yield Problem("checkpoint.peer_copy", given, allowed, "set it to false, or the others so")
    if bool(checkpoint.local_url) != bool(checkpoint.local_every_steps):
        given = f"given {checkpoint.local_every_steps}, with checkpoint.local_url = {checkpoint.local_url!r}"
        yield Problem(
            "checkpoint.local_every_steps", given, "above 0 if and only if there is a local_url", "give both, or neither"
        )
    if any(skip.last < skip.first for skip in config.data.skip):
        given = "given " + ", ".join(f"{skip.first} to {skip.last}" for skip in config.data.skip)
        yield Problem("data.skip", given, "ranges whose last update is not before the first", "exchange the two")
    if any(isinstance(policy, KeepBest) for policy in checkpoint.retention) and not config.evaluate.every_steps:
        given = 'given {keep = "best"}, with evaluate.every_steps = 0'
        yield Problem("checkpoint.retention", given, "keeping the best needs an evaluation", "give evaluate.every_steps")
    if config.evaluate.every_steps and not config.data.heldout_fraction:
        given = "given 0, with evaluate.every_steps = " + str(config.evaluate.every_steps)
        yield Problem("data.heldout_fraction", given, "above 0 where something is evaluated", "nearest: 0.01")


def _places(config: Config) -> Iterator[Problem]:
    run, checkpoint = config.run, config.checkpoint
    urls = {"run.url": run.url, "checkpoint.mirror_url": checkpoint.mirror_url, "checkpoint.local_url": checkpoint.local_url}
    for path, url in urls.items():
        if why := why_not(url):
            yield Problem(path, f'given "{url}": {why}', SUPPORTED, "move it there")
    for path, folder in {"run.local_dir": run.local_dir, "machine.shared_dir": config.machine.shared_dir}.items():
        if not is_local(folder):
            yield Problem(path, f'given "{folder}"', "a folder that this machine sees", "give a path, without a scheme")


def _recovery(config: Config) -> Iterator[Problem]:
    recovery = config.recovery
    if recovery.backoff_max_s < recovery.backoff_s:
        given = f"given {recovery.backoff_max_s}, with recovery.backoff_s = {recovery.backoff_s}"
        yield Problem("recovery.backoff_max_s", given, "at least recovery.backoff_s", f"nearest: {recovery.backoff_s}")


def _vocabulary(config: Config) -> Iterator[Problem]:
    if config.data.tokenizer == "byte" and config.model.vocab < BYTE_VOCAB:
        allowed = f"at least {BYTE_VOCAB}: 256 bytes and the end-of-document token"
        given = f'given {config.model.vocab}, with data.tokenizer = "byte"'
        yield Problem("model.vocab", given, allowed, f"nearest: {BYTE_VOCAB}")
    for index, source in enumerate(config.data.sources):
        if source.path == "stdlib" and config.data.tokenizer != "byte":
            given = f'given "stdlib", with data.tokenizer = "{config.data.tokenizer}"'
            yield Problem(f"data.sources.{index}.path", given, "`stdlib` is a corpus of bytes", 'use data.tokenizer = "byte"')


def _faults(config: Config) -> Iterator[Problem]:
    later = (phase.parallel.get("ranks") for phase in config.phases)  # may be of any type, if that is told already
    ranks = max([config.parallel.ranks, *(number for number in later if isinstance(number, int))])
    for index, fault in enumerate(config.faults):
        if fault.rank >= ranks:
            given = f"given {fault.rank}, with parallel.ranks = {ranks}"
            hint = f"nearest: {ranks - 1}"
            yield Problem(f"faults.{index}.rank", given, f"a rank of the run (0 to {ranks - 1})", hint)


RULES: tuple[Callable[[Config], Iterator[Problem]], ...] = (
    _ranks,
    _order,
    _heads,
    _width,
    _stages,
    _virtual_stages,
    _layer_counts,
    _groups,
    _sequence,
    _documents,
    _fsdp,
    _fsdp_groups,
    _experts,
    _expert_groups,
    _batch,
    _ramp,
    _schedule,
    _intervals,
    _places,
    _recovery,
    _vocabulary,
    _faults,
    _profile_steps,
)
