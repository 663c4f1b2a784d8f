"""torch.distributed.pipelining as an oracle: other stages, other schedules' code, the same gradients."""

import pytest
import torch
import torch.nn.functional as F
from engines import engine_of, initial
from pipelines import errors, one_of, piped
from reference import LAYER, attention, norm
from tiny import data_of
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from world import run_world


class Plain(torch.nn.Module):
    """A stage in plain PyTorch, from the papers' formulas, with the engine's initial values."""

    def __init__(self, weights, model, layers):
        super().__init__()
        self.model, self.layers_of = model, layers
        self.first, self.last = layers.start == 0, layers.stop == model.layers
        names = [f"layers.{layer}.{leaf}" for layer in layers for leaf in LAYER]
        names += ["embedding"] * self.first + ["norm", "head"] * self.last
        self.weights = torch.nn.ParameterDict({name.replace(".", "/"): weights[name].clone() for name in names})

    def named(self, name):
        return self.weights[name.replace(".", "/")]

    def forward(self, x):
        if self.first:
            x = self.named("embedding")[x]
        for layer in self.layers_of:
            own = {leaf: self.named(f"layers.{layer}.{leaf}") for leaf in LAYER}
            h = norm(x, own["attention_norm"], self.model.norm_eps)
            x = x + attention(h, own, self.model) @ own["attention.wo"].T
            h = norm(x, own["mlp_norm"], self.model.norm_eps)
            x = x + (F.silu(h @ own["mlp.w1"].T) * (h @ own["mlp.w3"].T)) @ own["mlp.w2"].T
        return norm(x, self.named("norm"), self.model.norm_eps) @ self.named("head").T if self.last else x


def _oracle(rank, config):
    """Gradients by torch.distributed.pipelining and by ours, on the same batch, initial values and stages."""
    engine = engine_of(config, rank)
    weights, batch = initial(one_of(config)), data_of(config).sequences(0, config.batch.global_batch)
    tokens, targets, valid = (torch.from_numpy(a) for a in (batch.tokens, batch.targets, batch.valid))
    targets, count = torch.where(valid, targets, -100), config.batch.global_batch
    plan, total = engine.passes.plan, int(valid.sum())
    mine = plan.stages_of(rank)
    modules = [Plain(weights, config.model, plan.layers[stage]) for stage in mine]
    stages = [PipelineStage(m, s, plan.num_stages, torch.device("cpu")) for m, s in zip(modules, mine, strict=True)]

    def loss(logits, wanted):
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum") / total

    maker = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}
    given = stages if config.parallel.schedule == "interleaved" else stages[0]
    theirs = maker[config.parallel.schedule](given, count, loss_fn=loss, scale_grads=False)
    last = plan.num_stages - 1 in mine
    theirs.step(*([tokens] if 0 in mine else []), **({"target": targets} if last else {}))
    engine._accumulate_gradients(0, engine.config.batch.global_batch)
    pairs = {}
    for module in modules:
        pairs |= {name.replace("/", "."): parameter.grad for name, parameter in module.weights.items()}
    ours = {name: view.main_grad for name, view in engine.optimizer.views().items()}
    return errors({name: grad.clone() for name, grad in ours.items()}, pairs)


@pytest.mark.dist
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_gradients_are_those_of_torch_pipelining(schedule):
    for found in run_world(_oracle, 2, piped(schedule, dtype="float64")):
        assert max(found.values()) < 1e-12, found
