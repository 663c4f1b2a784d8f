"""A mixture of experts against a loop over positions, against Hugging Face's Mixtral, and at its edges."""

import os

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from ftrain.config import Model
from ftrain.model.moe import Groups, Moe, Router, capacity, route
from ftrain.parallel.expert import Route, Routing, combine, dispatch
from ftrain.parallel.weight import Weight
from tests.mixture import loop

MODEL = Model(layers=1, hidden=8, heads=1, ffn=12, vocab=9, experts=5, experts_per_token=2)
B, T = 2, 7


def model(**changes):
    return msgspec.structs.replace(MODEL, **changes)


def block(of, seed=0):
    """A block with weights of size one, so that routing is far from even."""
    made, generator = Moe(of, 0, Groups()), torch.Generator().manual_seed(seed)
    for name, parameter in list(made.named_parameters()):
        weight = Weight(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        weight.main_grad = torch.zeros_like(weight)
        setattr(made, name, weight)
    return made


def positions(seed=1, sequences=B):
    return torch.randn(sequences, T, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"experts_per_token": 1},
        {"experts_per_token": 5},
        {"experts": 1, "experts_per_token": 1},
        {"capacity": 0.5},
        {"capacity": 1.0, "experts_per_token": 3},
    ],
    ids=str,
)
def test_it_is_a_loop_over_positions(changes):
    of = model(**changes)
    made, x, balance = block(of), positions().requires_grad_(), torch.tensor([0.3, 0.7], dtype=torch.float64)
    weights = {name: parameter.detach().clone().requires_grad_() for name, parameter in made.named_parameters()}
    theirs = x.detach().clone().requires_grad_()
    outputs, losses = zip(*(loop(theirs[b], weights, of, float(balance[b])) for b in range(B)), strict=True)
    dy = positions(2)
    (sum(losses) + (torch.stack(outputs) * dy).sum()).backward()
    y = made(x, Routing(balance))
    y.backward(dy)
    torch.testing.assert_close(y, torch.stack(outputs), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(x.grad, theirs.grad, rtol=1e-12, atol=1e-12)
    for name, parameter in made.named_parameters():
        assert parameter.grad is None
        torch.testing.assert_close(parameter.main_grad, weights[name].grad, rtol=1e-12, atol=1e-12)


def hugging_face():
    os.environ["HF_HUB_OFFLINE"] = "1"
    return pytest.importorskip("transformers.models.mixtral.modeling_mixtral"), pytest.importorskip(
        "transformers"
    ).MixtralConfig


def test_it_is_mixtral():
    theirs, config = hugging_face()
    made, x = block(MODEL), positions()
    block_of_theirs = theirs.MixtralSparseMoeBlock(
        config(
            hidden_size=8,
            intermediate_size=12,
            num_local_experts=5,
            num_experts_per_tok=2,
            num_attention_heads=1,
            num_key_value_heads=1,
        )
    ).double()
    state = {
        "gate.weight": made.router,
        "experts.gate_up_proj": torch.cat([made.w1, made.w3], 1),
        "experts.down_proj": made.w2,
    }
    block_of_theirs.load_state_dict({name: value.detach() for name, value in state.items()})
    torch.testing.assert_close(made(x, Routing()), block_of_theirs(x), rtol=1e-6, atol=1e-6)  # theirs takes a softmax in fp32


def test_the_balance_loss_is_theirs_of_each_sequence():
    theirs, _ = hugging_face()
    made, x = block(MODEL), positions()
    logits = [(x[b] @ made.router.detach().t()).requires_grad_() for b in range(B)]
    balance = torch.tensor([0.3, 0.7], dtype=torch.float64)
    for b in range(B):
        (theirs.load_balancing_loss_func((logits[b],), 5, 2) / 2 * balance[b]).backward()
    made.w2.data.zero_()  # what positions learn is left out
    made(x.requires_grad_(), Routing(balance)).sum().backward()
    expected = sum(logits[b].grad.t() @ x[b].detach() for b in range(B))
    torch.testing.assert_close(made.router.main_grad, expected, rtol=1e-5, atol=1e-8)


def test_even_choices_have_a_balance_loss_of_one():
    logits = torch.zeros(4, 4)
    logits[range(4), range(4)] = 1.0
    _, loss = loop(logits, {"router": torch.eye(4), **dict.fromkeys(("w1", "w2", "w3"), torch.zeros(4, 4, 4))},
                   model(experts=4, experts_per_token=1, hidden=4, ffn=4), 1.0)  # fmt: skip
    assert loss.item() == pytest.approx(1.0)


def test_sequences_do_not_meet():
    """What becomes of a sequence does not depend on its company, neither its room nor its balance."""
    of = model(capacity=0.5)
    x, balance = positions(), torch.tensor([0.3, 0.7], dtype=torch.float64)
    together = block(of)
    y = together(x.clone().requires_grad_(), Routing(balance))
    y.sum().backward()
    apart = block(of)
    for b in range(B):
        alone = apart(x[b : b + 1].clone().requires_grad_(), Routing(balance[b : b + 1]))
        torch.testing.assert_close(alone[0], y[b], rtol=1e-12, atol=1e-12)
        alone.sum().backward()
    for name, parameter in together.named_parameters():
        torch.testing.assert_close(parameter.main_grad, apart.get_parameter(name).main_grad, rtol=1e-12, atol=1e-12)


def test_room_is_causal():
    """A later position turns no earlier one away."""
    made, x = block(model(capacity=0.5)), positions()
    y, changed = made(x, Routing()), x.clone()
    changed[:, 4:] = positions(5)[:, 4:]
    assert torch.equal(made(changed, Routing())[:, :4], y[:, :4])


@pytest.mark.parametrize(
    ("factor", "length", "k", "experts", "rows"),
    [(1.0, 16, 2, 8, 4), (1.25, 16, 2, 4, 10), (1.1, 20, 1, 2, 11), (0.01, 16, 2, 8, 1), (0.75, 8, 2, 4, 3)],
)
def test_room_is_rounded_up_from_the_factor_as_written(factor, length, k, experts, rows):
    """1.1 x 20 / 2 is 11, though 1.1 as a binary fraction is a little more."""
    assert capacity(model(capacity=factor, experts_per_token=k, experts=experts), length) == rows


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that is made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple) else (made,):
            self.numel = max(self.numel, tensor.numel() if isinstance(tensor, torch.Tensor) else 0)
        return made


def test_choices_are_counted_without_a_row_of_experts_each():
    """8 of 128 experts for 512 positions: as 0 and 1 that would be half a million numbers."""
    of = model(capacity=1.0, experts=128, experts_per_token=8)
    router = Router(of, 0, Groups(), Routing(torch.ones(1)))
    chosen = torch.rand(1, 512, 128, generator=torch.Generator().manual_seed(1)).argsort(-1)[..., :8]
    with Largest() as largest:
        counts = router.counts(chosen)
        kept, slope = router.kept(chosen, counts), router.slope(counts, 512, torch.float32)
    assert largest.numel == chosen.numel()
    room = capacity(of, 512)
    for expert in range(128):
        places = (chosen == expert).nonzero()
        assert kept[chosen == expert].tolist() == [number < room for number in range(len(places))]
        assert slope[0, expert].item() == pytest.approx(len(places) * 128 / (8 * 512**2))


def test_of_equal_logits_the_first_experts_are_chosen():
    x, router = torch.ones(1, 3, 8), Weight(torch.zeros(5, 8))
    weights, chosen, kept = route(x, router, Router(MODEL, 0, Groups(), Routing()))
    assert chosen.tolist() == [[0, 1]] * 3
    assert weights.tolist() == [[0.5, 0.5]] * 3
    assert kept is None


def test_other_choices_are_weighed_by_their_own_logits():
    """What a certificate replays."""
    made, x = block(MODEL), positions()
    told = []

    def choose(layer, own):
        told.append((layer, own.shape))
        return (own + 1) % 5

    router = Router(MODEL, 3, Groups(), Routing(choose=choose))
    weights, chosen, _ = route(x, made.router, router)
    logits = (x @ made.router.t()).flatten(0, 1)
    torch.testing.assert_close(weights, logits.gather(1, chosen).softmax(-1), rtol=1e-12, atol=1e-12)
    assert told == [(3, (B, T, 2))]


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_a_route_leads_to_the_experts_and_back(data):
    n, k, experts = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 3)), data.draw(st.integers(3, 6))
    chosen = torch.tensor([data.draw(st.permutations(range(experts)))[:k] for _ in range(n)])
    kept = None
    if data.draw(st.booleans()):
        kept = torch.tensor(data.draw(st.lists(st.lists(st.booleans(), min_size=k, max_size=k), min_size=n, max_size=n)))
    x = torch.arange(1.0, n + 1).unsqueeze(1)
    way = Route.of(None, chosen, kept, experts)
    rows = dispatch(x, way)
    expected = [x[p].item() for e in range(experts) for p in range(n) for i in range(k)
                if chosen[p, i] == e and (kept is None or kept[p, i])]  # fmt: skip
    assert rows.flatten().tolist() == expected
    assert sum(way.counts) == len(expected)
    weights = torch.rand(n, k)
    scale = torch.cat([torch.full((count, 1), 10.0**e) for e, count in enumerate(way.counts)])
    taken = torch.ones(n, k) if kept is None else kept.float()
    wanted = (weights * taken * 10.0**chosen * x).sum(1, keepdim=True)
    torch.testing.assert_close(combine(rows * scale, weights, way), wanted)
