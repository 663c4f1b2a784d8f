"""Parameters of the model and of what one rank holds of it, from the shape alone.

The ideal rows divide a round number evenly. A real rank holds whole layers, its own copy of every norm, key and value heads
that cannot be cut further, and at the ends the embedding or the head. That difference is what runs out of memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from ftrain.combinations import head_dim, kv_heads
from ftrain.plan.setup import Setup

MOST_LAYERS = 4096
"""Of a model whose buffers are planned bucket by bucket; nobody has built a deeper one, and its padding is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Parameters of one TP rank on one pipeline rank."""

    layers: int
    """Decoder layers, over all of its virtual stages."""
    matrices: int
    """Parameters of the layers' matrices, without those of experts."""
    norms: int
    """Norms and routers: replicated on every TP rank."""
    embedding: int
    head: int
    experts: int = 0
    """Parameters of this rank's experts, which fewer ranks share than the rest."""
    final: int = 0
    """Of the norms the last one, where the model ends on this rank."""

    @property
    def total(self) -> int:
        """All parameters of the rank."""
        return self.matrices + self.norms + self.embedding + self.head + self.experts

    @property
    def is_last(self) -> bool:
        """Whether the model ends here."""
        return self.final > 0

    @property
    def ends(self) -> int:
        """Parameters that belong to no layer."""
        return self.embedding + self.head + self.final

    @property
    def common(self) -> int:
        """Parameters that all ranks of DP x CP hold alike."""
        return self.total - self.experts


def layer_matrices(setup: Setup) -> int:
    """Matrix parameters of one layer on one TP rank: q, k, v, o, and gate, up, down where there are no experts."""
    model, tp = setup.config.model, setup.mesh.tp
    attention = model.hidden * (2 * setup.queries // tp + 2 * setup.local_keys)
    return attention + (0 if model.experts else 3 * model.hidden * model.ffn // tp)


def layer_experts(setup: Setup) -> int:
    """Parameters of the experts of one layer on one TP rank: gate, up and down of its share of them."""
    model, mesh = setup.config.model, setup.mesh
    return model.experts // setup.mesh.ep * 3 * model.hidden * model.ffn // mesh.tp


def norm_params(setup: Setup) -> int:
    """Parameters of one layer that TP does not cut: two norms of the residual stream, two of a head's queries and keys if there
    are any, and the router."""
    model = setup.config.model
    return (2 + model.experts) * model.hidden + (2 * head_dim(setup.config) if model.qk_norm else 0)


def vocabulary_rows(setup: Setup) -> int:
    """Rows of the embedding (and of the head) on the first TP rank: the vocabulary is cut in whole units of rows."""
    vocab, tp = setup.config.model.vocab, setup.mesh.tp
    if tp in (1, 2, 4, 8, 16) and vocab % tp == 0:
        return vocab // tp  # even cuts are promised where there are some; this spares the import
    from ftrain.parallel.layout import vocabulary_unit

    unit = vocabulary_unit(vocab)
    units = -(-vocab // unit)
    return min(vocab, -(-units // tp) * unit)


def shards(setup: Setup) -> tuple[Shard, ...]:
    """What each pipeline rank holds."""
    return tuple(shard(setup, rank) for rank in range(setup.mesh.pp))


def heaviest(setup: Setup) -> tuple[int, ...]:
    """The pipeline ranks among which the largest shard is: both ends, and the second, which has as many layers as any other."""
    return tuple(sorted({0, min(1, setup.mesh.pp - 1), setup.mesh.pp - 1}))


def largest(setup: Setup) -> Shard:
    """The largest shard of all pipeline ranks."""
    return max((shard(setup, rank) for rank in heaviest(setup)), key=lambda own: own.total)


def shard(setup: Setup, rank: int) -> Shard:
    """What a pipeline rank holds, on the TP rank that holds most."""
    known: dict[int, Shard] = setup.staged.setdefault("shards", {})
    if rank not in known:
        known[rank] = _shard(setup, rank)
    return known[rank]


def _shard(setup: Setup, rank: int) -> Shard:
    if "sizes" not in setup.memo:
        rows = vocabulary_rows(setup) * setup.config.model.hidden
        setup.memo["sizes"] = (layer_matrices(setup), layer_experts(setup), rows)
    matrices, experts, rows = setup.memo["sizes"]
    model, mesh = setup.config.model, setup.mesh
    stages = setup.stages_of(rank)
    layers = sum(len(setup.stages[stage]) for stage in stages)
    first, last = 0 in stages, mesh.pp * setup.chunks - 1 in stages
    return Shard(
        layers=layers,
        matrices=layers * matrices,
        norms=layers * norm_params(setup) + (model.hidden if last else 0),
        embedding=rows if first else 0,
        head=rows if last and not (model.tied and first) else 0,
        experts=layers * experts,
        final=model.hidden if last else 0,
    )


def alignment(setup: Setup, rank: int) -> dict[int, int]:
    """Elements of a pipeline rank's buffers that belong to no parameter, by how many ranks of DP x CP have others (experts; 1:
    all have the same): its buckets, planned as the engine plans them."""
    from ftrain.parallel.buckets import plan_buckets
    from ftrain.parallel.layout import parameters
    from ftrain.parallel.shape import Coordinate

    if setup.options.sharding != "zero1" or setup.config.model.layers > MOST_LAYERS:
        return {}
    if "specs" not in setup.staged:
        counts = tuple(len(layers) for layers in setup.stages)
        setup.staged["specs"] = parameters(setup.config.model, setup.mesh, layer_counts=counts, placement=setup.placement)
    stages = setup.stages_of(rank)
    alike = (*(len(setup.stages[stage]) for stage in stages), 0 in stages, len(setup.stages) - 1 in stages)
    paddings = setup.staged.setdefault("alignment", {})
    if alike not in paddings:  # most pipeline ranks are like another one
        bucket_bytes = setup.config.parallel.bucket_mib * 2**20
        buckets = plan_buckets(setup.staged["specs"], setup.mesh, Coordinate(pp=rank), bucket_bytes=bucket_bytes)
        paddings[alike] = {n: sum(b.padding for b in buckets if b.sharers == n) for n in {b.sharers for b in buckets}}
    found: dict[int, int] = paddings[alike]
    return found


def replicated(setup: Setup) -> int:
    """Extra copies of parameters that TP ranks hold more than once (norms, routers; key and value heads where tp exceeds
    them)."""
    model, tp = setup.config.model, setup.mesh.tp
    norms = (tp - 1) * (model.layers * norm_params(setup) + model.hidden)
    copies = max(0, tp - kv_heads(setup.config)) * head_dim(setup.config) * 2 * model.hidden * model.layers
    return norms + copies
