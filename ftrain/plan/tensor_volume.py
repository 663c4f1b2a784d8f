"""What tensor parallelism sends, collective by collective as `ftrain.parallel.tensor` and `ftrain.parallel.ops` issue them.

Into a block an activation is widened, out of it the ranks' shares are narrowed: with sequence parallelism an all-gather and a
reduce-scatter, without it nothing and an all-reduce, which sends what both together do. That is the founding row: two of each
in a layer's forward, two in its backward. Beyond it come what is gathered again, what the ends of the model exchange, and the
gradients of what all ranks hold alike.
"""

from __future__ import annotations

from collections.abc import Iterator

from ftrain.combinations import head_dim, kv_heads
from ftrain.plan.params import Shard, heaviest, shard
from ftrain.plan.ring import Line, Volume, lines
from ftrain.plan.setup import Quantity, Setup
from ftrain.plan.state import GRADIENT, shares

IDEAL = "4 x 2(t-1)/t x w sbh/c x layers x m (2 forward, 2 backward; with SP as all-gather + reduce-scatter)"


def tensor(setup: Setup) -> Volume:
    """Of the pipeline rank that sends most."""
    found = [_volume(setup, shard(setup, rank)) for rank in heaviest(setup)]
    return max(found, key=lambda volume: volume.nbytes)


def _volume(setup: Setup, own: Shard) -> Volume:
    stream = setup.tokens * setup.config.model.hidden
    passes = own.layers * setup.microbatches
    ideal = Line("activations of attention and MLP", IDEAL, 4 * setup.ring(setup.mesh.tp) * setup.width * stream * passes)
    beyond = (*_of_layers(setup, passes), *_of_ends(setup, own), *_gradients(setup, own))
    return Volume(name="TP", axes=("tp",), members=setup.mesh.tp, lines=lines(ideal, *beyond))


def _widened(setup: Setup) -> Quantity:
    """Share of an activation that a rank sends to make it whole: nothing if it is whole everywhere."""
    return setup.half_ring(setup.mesh.tp) if setup.config.parallel.sp else 0


def _narrowed(setup: Setup) -> Quantity:
    """Share that it sends to have it summed."""
    return setup.half_ring(setup.mesh.tp) if setup.config.parallel.sp else setup.ring(setup.mesh.tp)


def _of_layers(setup: Setup, passes: int) -> Iterator[Line]:
    """Beyond the ideal, of `passes` layers times micro-batches."""
    model, w, sums, wide = setup.config.model, setup.width, setup.sums, setup.exact
    into, out, experts = _widened(setup), _narrowed(setup), model.experts > 0
    stream = setup.tokens * model.hidden * passes
    scores = setup.tokens * model.experts * passes * wide
    regathers = (1 if experts else 2) if setup.config.parallel.sp_regather else 0
    yield Line("inputs gathered again in backward (parallel.sp_regather)", f"{regathers} x (t-1)/t x w sbh/c x layers x m",
               regathers * into * w * stream)  # fmt: skip
    yield Line("sums are in fp32 on a CPU", "4 x (t-1)/t x (4 - w) sbh/c x layers x m", 4 * out * (sums - w) * stream)
    if experts:
        yield Line("experts' outputs are summed in fp32", "(t-1)/t x (4 - w) sbh/c x layers x m", out * (wide - sums) * stream)
        yield Line("scores of the router and their gradients", "2 x (t-1)/t x 4 sbE/c x layers x m", (into + out) * scores)
    if setup.options.recompute == "full":
        made = wide if experts else sums
        yield Line("forward once more (recompute full)", "2 x 2(t-1)/t x w sbh/c x layers x m",
                   (2 * into * w + out * (sums + made)) * stream + into * scores)  # fmt: skip


def _of_ends(setup: Setup, own: Shard) -> Iterator[Line]:
    """The embedding of the first stage, head and loss of the last."""
    w, sums, into, out = setup.width, setup.sums, _widened(setup), _narrowed(setup)
    tokens = setup.tokens * setup.microbatches
    stream = tokens * setup.config.model.hidden
    if own.embedding:
        yield Line("embedding: rows forward, their gradients back", "2(t-1)/t x w sbh/c x m", (out * sums + into * w) * stream)
    if own.is_last:
        again = 2 if setup.config.parallel.sp_regather else 1
        yield Line("head: its input and its gradient", f"{again + 1} x (t-1)/t x w sbh/c x m",
                   (again * into * w + out * sums) * stream)  # fmt: skip
        yield Line("loss: largest logit, sum of exponentials, target's logit", "3 x 2(t-1)/t x 4 sb/c x m",
                   3 * setup.ring(setup.mesh.tp) * setup.exact * tokens)  # fmt: skip


def _gradients(setup: Setup, own: Shard) -> Iterator[Line]:
    """Once an update, in fp32: of what tp does not cut, as far as this rank holds them."""
    model, mesh, held = setup.config.model, setup.mesh, shares(setup)["gradients"]
    norms = own.norms if setup.config.parallel.sp else own.layers * (2 * head_dim(setup.config) if model.qk_norm else 0)
    yield Line("gradients of norms and routers", "2(t-1)/t x 4 B x norms",
               setup.ratio(GRADIENT * norms, held) * setup.ring(mesh.tp))  # fmt: skip
    copies = max(1, mesh.tp // kv_heads(setup.config))
    keys = 2 * model.hidden * setup.local_keys * own.layers
    yield Line("gradients of copied key and value heads", "2(n-1)/n x 4 B x 2 h kv x layers, n = t / kv heads",
               setup.ratio(GRADIENT * keys, held) * setup.ring(copies))  # fmt: skip
