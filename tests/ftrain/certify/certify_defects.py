"""Defects that a certificate must find, each a context manager that breaks this process's engine for one task.

Only tests know them: a worker is told `certify_defects:name`. Most are bugs that were shipped by others; each leaves training
plausible: it runs, and the loss falls.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import torch

from ftrain.model import attention, init, moe, transformer
from ftrain.parallel import context, expert, fsdp, layout, mesh, ops, optimizer, shape, weight
from ftrain.train import passes, step

DEFECTS = {}


def defect(under, parameter, *, what="grad", mode="fp64"):
    """Register a defect: under which layout, and which parameter must be named (a pattern), as what."""

    def register(function):
        made = contextmanager(function)
        DEFECTS[function.__name__] = (under, parameter, what, mode)
        return made

    return register


def patched(owner, name, broken):
    """`broken` is given the original first."""
    original = getattr(owner, name)
    return patch.object(owner, name, lambda *args, **options: broken(original, *args, **options))


@defect("pp=2", "embedding|head|layers", what="master")
def stage_local_norm():
    """Each stage clips by the norm of its own gradients (Megatron-LM 596)."""

    def vote(original, mesh, *, squares, loss, flags, exact):
        outcome = original(mesh, squares=squares, loss=loss, flags=flags, exact=exact)
        return replace(outcome, norm=math.sqrt(float(mesh.all_reduce(squares.clone(), ("dp",)))))

    with patched(step, "vote", vote):
        yield


@defect("tp=2", r"layers\.0\.attention_norm")
def sequence_parallel_norm_not_summed():
    with patched(optimizer.ShardedAdamW, "_sum_partial", lambda original, self, region: None):
        yield


@defect("tp=4", r"layers\.0\.attention\.wk")
def copies_of_kv_heads_not_summed():
    def sum_neighbours(original, self, tensor, width):
        return tensor if width < self.shape.tp else original(self, tensor, width)

    with patched(mesh.Mesh, "sum_neighbours", sum_neighbours):
        yield


@defect("pp=2", r"layers\.1\.mlp\.w1")
def dropped_layer():
    """30 layers silently built as 28 (Megatron-LM 1304)."""

    def forward(original, self, x, part=None, *facts):
        kept = [name for name in (self.blocks if part is None else part) if name != "layers.1"]
        return original(self, x, kept, *facts)

    with patched(transformer.Transformer, "forward", forward):
        yield


@defect("pp=2,model.tied=true", "embedding")
def doubled_tied_gradient():
    def reduce_twins(original, self):
        original(self)
        for region in self.regions:
            if region.twin is not None:
                self.mesh.region(region.main_grad).mul_(2)

    with patched(optimizer.ShardedAdamW, "reduce_twins", reduce_twins):
        yield


@defect("pp=2,model.tied=true", "embedding", what="weights")
def twin_keeps_its_old_weights():
    def update(original, self, **options):
        kept = [(r.weights, r.weights.clone()) for r in self.regions if r.is_copy(self._pp)]
        original(self, **options)
        for weights, before in kept:
            weights.copy_(before)

    with patched(optimizer.ShardedAdamW, "update", update):
        yield


@defect("tp=2", r"layers\.0\.attention\.wq")
def wrong_rope_offset():
    """Keys stand one place further on than queries."""

    def rotate(original, x, cos, sin, *kernels):
        is_keys = x.shape[2] == 1
        return original(x, cos.roll(1, 0), sin.roll(1, 0), *kernels) if is_keys else original(x, cos, sin, *kernels)

    with patched(transformer, "rotate", rotate):
        yield


@defect("dp=3", r"layers\.0\.mlp\.w2")
def mean_of_unequal_microbatches():
    """Each replica divides by its own tokens."""

    def accumulate(original, self, parts, scale):
        return original(self, parts, 1 / (sum(int(part.valid.sum()) for part in parts) * self.mesh.shape.dp))

    with patched(passes.Passes, "accumulate", accumulate):
        yield


@defect("pp=2", r"layers\.1\.mlp\.w2")
def missing_loss_scale():
    """PP gradients unscaled (torchtitan 2972)."""
    with patched(passes.Passes, "accumulate", lambda original, self, parts, scale: original(self, parts, 1.0)):
        yield


@defect("tp=2,model.kv_heads=4", r"layers\.0\.attention\.wq")
def queries_and_keys_swapped():
    def column(original, group, x, *weights):
        outputs = original(group, x, *weights)
        return (outputs[1], outputs[0], outputs[2]) if len(outputs) == 3 else outputs

    with patched(transformer, "column", column):
        yield


@defect("dp=2", "embedding", what="weights")
def stale_weights_after_update():
    """The replicas' regions are updated and not gathered."""

    def update(original, self, **options):
        with patched(optimizer.ShardedAdamW, "start_gather", lambda *args, **options: None):
            original(self, **options)

    with patched(optimizer.ShardedAdamW, "update", update):
        yield


@defect("tp=2", r"layers\.0\.mlp\.w1", what="master")
def bias_correction_off_by_one():
    def update(original, self, *, number, **options):
        original(self, number=number + 1, **options)

    with patched(optimizer.ShardedAdamW, "update", update):
        yield


@defect("dp=2", r"layers\.0\.mlp_norm", what="master")
def weight_decay_on_norms():
    def decay_runs(original, region):
        return [(start, stop, True) for start, stop, _ in original(region)]

    with patched(optimizer, "_decay_runs", decay_runs):
        yield


@defect("tp=2", "embedding")
def vocabulary_shard_off_by_one():
    def of(original, *args):
        group = original(*args)
        if group is None or not group.vocabulary.start:
            return group
        return replace(group, vocabulary=range(group.vocabulary.start + 1, group.vocabulary.stop + 1))

    with patched(ops.TensorGroup, "of", of):
        yield


@defect("dp=2", r"layers\.1\.attention\.wv")
def wrong_microbatches_dealt():
    """Everybody computes the first replica's."""
    with patched(step, "microbatches", lambda original, size, micro, count, replica: original(size, micro, count, 0)):
        yield


@defect("dp=2", r"layers\.0\.attention\.wo", what="digest")
def initial_values_depend_on_the_cut():
    def fill(original, out, box, *, spec, model, seed):
        original(out, box, spec=spec, model=model, seed=seed + torch.distributed.get_rank())

    with patched(init, "fill", fill):
        yield


@defect("pp=2", r"layers\.0\.mlp\.w1", mode="fp32")
def gradients_accumulated_in_bf16():
    """1 % off after 64 micro-batches."""

    def accumulate(original, matrix, dy, x):
        original(matrix, dy, x)
        matrix.main_grad.copy_(matrix.main_grad.bfloat16())

    with patched(weight, "accumulate", accumulate):
        yield


@defect("cp=2", r"layers\.1\.mlp\.w2")
def context_loss_scaled_by_own_tokens():
    """Each rank divides by the tokens it has itself (Megatron-LM 906, 673)."""

    def accumulate(original, self, parts, scale):
        own = sum(int(part.part(self.context).valid.sum()) for part in parts)
        return original(self, parts, 1 / (own * self.mesh.shape.cp))

    with patched(passes.Passes, "accumulate", accumulate):
        yield


@defect("cp=2", r"layers\.1\.attention\.w[kv]")
def gradients_of_keys_and_values_stay_abroad():
    """Each rank keeps what its own queries make of its own keys (Megatron-LM 1465)."""
    with patched(context._Whole, "home", lambda original, self: self._sums[self.group.index]):
        yield


@defect("cp=2,cp_exchange=ring", r"layers\.1\.attention\.w[kv]")
def gradients_come_home_one_place_early():
    """The last pass of the ring is forgotten: a rank takes its neighbour's."""

    def home(original, self):
        arrived = original(self)
        self.asked = getattr(self, "asked", 0) + 1  # once for each block to add to, then for the result
        return self._other if self.asked > self.group.size > 1 else arrived

    with patched(context._Travelling, "home", home):
        yield


@defect("cp=2,cp_exchange=ring", r"layers\.1\.attention\.wq")
def backward_of_a_block_with_its_own_lse():
    """As if each block had been all there is."""

    def backward(original, merged, operands, *where):
        out, lse = attention.block_attention(*operands, *where)
        return original(merged._replace(out=out, lse=lse), operands, *where)

    with patched(attention, "block_attention_backward", backward):
        yield


@defect("cp=2", r"layers\.0\.attention\.wq")
def positions_counted_on_each_rank():
    """Rotary positions as if the rank's part were a sequence of its own."""

    def tables(original, spans, *options):
        return original((range(sum(map(len, spans))),), *options)

    with patched(transformer, "rotary_tables", tables):
        yield


@defect("cp=2,data.document_mask=true", r"layers\.1\.attention\.wv")
def documents_of_the_wrong_positions():
    """Keys take document numbers as if every block were the beginning of the sequence."""

    def documents(original, self, whole):
        return original(self._replace(k_pos=(range(sum(map(len, self.k_pos))),)), whole)

    with patched(attention.Block, "documents", documents):
        yield


@defect("dp=2,sharding=fsdp", r"layers\.1\.mlp\.w2")
def fsdp_divides_by_the_replicas():
    """What `fully_shard` does unless told otherwise; gradients are divided by the tokens of all replicas already."""
    with patch.object(fsdp.FSDPModule, "set_gradient_divide_factor", lambda self, factor: None):
        yield


@defect("dp=2,sharding=fsdp", r"layers\.\d\.mlp\.w[123]", mode="fp32")
def fsdp_computes_with_the_masters():
    """As `fully_shard` with fp32 parameters does: better weights, and another function."""
    with patched(fsdp.FullyShardedAdamW, "_round_on_use", lambda original, self, parameter: None):
        yield


@defect("dp=4,sharding=hfsdp,fsdp_inner=2", r"layers\.1\.mlp\.w2", what="weights")
def outer_group_is_not_told():
    """Rows that another group has updated stay what they were."""

    def update(original, self, **options):
        with patched(fsdp.FullyShardedAdamW, "_exchange", lambda original, self: None):
            original(self, **options)

    with patched(fsdp.FullyShardedAdamW, "update", update):
        yield


@defect("tp=2,dp=2,sharding=fsdp", r"layers\.0\.attention_norm")
def fsdp_forgets_the_tensor_parallel_sums():
    with patched(fsdp.FullyShardedAdamW, "reduce_twins", lambda original, self: None):
        yield


MOE = "model.experts=4"


@defect(f"tp=2,{MOE}", r"layers\.\d\.moe\.router")
def router_gradient_not_summed():
    """Each rank of a sequence-parallel group has scored its own positions only."""

    def summands(original, self, tp):
        return 1 if self.name.endswith("router") else original(self, tp)

    with patched(layout.ParameterSpec, "summands", summands):
        yield


@defect(f"dp=4,ep=2,{MOE}", r"layers\.\d\.moe\.w[123]")
def experts_summed_over_the_wrong_group():
    """Over those that share out the experts, who have others, instead of those that have the same."""
    mesh.members.cache_clear()
    with patch.object(shape.MeshShape, "expert_replicas", shape.MeshShape.expert_group):
        yield
    mesh.members.cache_clear()


@defect(f"cp=2,ep=2,{MOE}", r"layers\.\d\.moe\.router")
def balance_of_own_positions():
    """Each rank of a context-parallel group takes its part of a sequence for all of it."""
    with patched(moe.Router, "whole", lambda original, self, chosen: chosen):
        yield


@defect(f"cp=2,ep=2,{MOE},model.capacity=0.75", r"layers\.\d\.moe\.w[123]")
def room_for_each_ranks_positions():
    """An expert takes the first positions of each rank's part of a sequence."""

    def kept(original, self, whole, counts):
        own = self.groups.context.cut(whole)
        alone = replace(self, groups=moe.ALONE)
        return original(alone, own, self.counts(own))

    with patched(moe.Router, "kept", kept):
        yield


@defect(f"dp=2,ep=2,{MOE}", r"layers\.\d\.moe\.w2")
def outputs_come_back_in_another_order():
    """As the experts made them, not as they had been sent."""

    def back(original, self, rows):
        return self.group.mesh.exchange(rows, self.received, self.sent)

    with patched(expert.Route, "back", back):
        yield


@contextmanager
def raises_on_rank_1():
    """Not a defect of the engine: the task itself breaks, on one rank."""
    init_group = torch.distributed.init_process_group

    def init_process_group(*args, rank, **options):
        init_group(*args, rank=rank, **options)
        if rank == 1:
            raise ValueError("I am rank 1")

    with patch.object(torch.distributed, "init_process_group", init_process_group):
        yield
