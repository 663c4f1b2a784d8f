"""The model's names and shapes, its pieces against plain formulas, and sampling."""

from itertools import islice

import pytest
import torch
import torch.nn.functional as F
from reference import forward, norm, rotate
from tiny import tiny

from ftrain.config import Model
from ftrain.model import functional, init
from ftrain.model.attention import attention, rotary_tables
from ftrain.model.functional import Weight
from ftrain.model.transformer import Transformer
from ftrain.parallel.layout import parameters
from ftrain.parallel.optimizer import View
from ftrain.parallel.shape import MeshShape
from ftrain.train.sample import generate
from storage.box import Box

LLAMA3_405B = Model(layers=126, hidden=16384, heads=128, kv_heads=8, ffn=53248, vocab=128256)


def weights_of(model, dtype=torch.bfloat16):
    weights = {}
    for spec in parameters(model, MeshShape()):
        weights[spec.name] = torch.empty(spec.shape, dtype=dtype)
        init.fill(weights[spec.name], Box.whole(spec.shape), spec=spec, model=model, seed=0)
    return weights


@pytest.mark.parametrize("model", [LLAMA3_405B, tiny().model, tiny(model={"tied": True, "head_dim": 10}).model])
def test_modules_and_placement_table_agree(model):
    """Built without storage, so the largest model costs nothing."""
    modules = {name: tuple(p.shape) for name, p in Transformer(model, dtype=torch.float32).named_parameters()}
    assert modules == {spec.name: spec.shape for spec in parameters(model, MeshShape())}


def test_405b_has_405_billion_parameters():
    assert sum(spec.size for spec in parameters(LLAMA3_405B, MeshShape())) == 405_853_388_800


def test_a_stage_keeps_the_numbers_of_its_layers():
    model = Model(layers=5, hidden=32, heads=4, ffn=48, vocab=61, tied=True)
    stages = [Transformer(model, dtype=torch.float32, layers=layers) for layers in (range(2), range(2, 4), range(4, 5))]
    names = [{name for name, _ in stage.named_parameters()} for stage in stages]
    for stage, own in enumerate(names):
        assert own == {spec.name for spec in parameters(model, MeshShape(pp=3), layer_counts=(2, 2, 1)) if stage in spec.stages}


def test_a_layout_that_does_not_fit_the_model_is_refused():
    decoder = Transformer(tiny().model, dtype=torch.float32)
    with pytest.raises(ValueError, match="the layout"):
        decoder.place({"embedding": View(torch.zeros(3, 3), torch.zeros(3, 3))})


def weight(*shape, seed=0):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    own = Weight(values)
    own.main_grad = torch.zeros_like(values)
    return own, values.clone().requires_grad_()


def check(ours, plain, inputs, pairs):
    """The same output, the same gradient of the input and the same weight gradients; none in `.grad`; added, not set."""
    mine, theirs = (x.clone().requires_grad_() for x in (inputs, inputs))
    out, expected = ours(mine), plain(theirs)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    direction = torch.randn_like(expected)
    out.backward(direction)
    expected.backward(direction)
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-12)
    for own, other in pairs:
        assert own.grad is None
        torch.testing.assert_close(own.main_grad, other.grad, rtol=1e-12, atol=1e-12)
    ours(inputs.clone().requires_grad_()).backward(direction)
    for own, other in pairs:
        torch.testing.assert_close(own.main_grad, 2 * other.grad, rtol=1e-12, atol=1e-12)


X = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_project():
    (a, pa), (b, pb) = weight(4, 16), weight(7, 16, seed=2)
    check(
        lambda x: torch.cat(functional.project(x, a, b), -1),
        lambda x: torch.cat([x @ pa.T, x @ pb.T], -1),
        X,
        [(a, pa), (b, pb)],
    )


def test_rms_norm():
    own, plain = weight(16)
    check(lambda x: functional.rms_norm(x, own, 1e-5), lambda x: norm(x, plain, 1e-5), X, [(own, plain)])


def test_swiglu():
    check(lambda x: functional.swiglu(x, x.flip(0)), lambda x: F.silu(x) * x.flip(0), X, [])


def test_rotate():
    tables = rotary_tables((range(5),), 8, 10_000.0, torch.float64, torch.device("cpu"))
    check(
        lambda x: functional.rotate(x.unflatten(-1, (2, 8)), *tables),
        lambda x: rotate(x.unflatten(-1, (2, 8)), 10_000.0),
        X,
        [],
    )


def test_embed():
    own, plain = weight(9, 16)
    tokens = torch.tensor([[1, 8, 1, 0]])
    out = functional.embed(tokens, own, torch.float64)
    assert torch.equal(out, plain[tokens])
    direction = torch.randn_like(out)
    out.backward(direction)
    plain[tokens].backward(direction)
    torch.testing.assert_close(own.main_grad, plain.grad)
    assert own.grad is None


def test_head_loss():
    own, plain = weight(9, 16)
    targets, valid = torch.arange(15) % 9, torch.arange(15) % 4 > 0
    check(
        lambda x: functional.head_loss(x.flatten(0, 1), own, torch.where(valid, targets, -100), valid, 0.25),
        lambda x: 0.25 * F.cross_entropy(x.flatten(0, 1) @ plain.T, targets, reduction="none")[valid].sum(),
        X,
        [(own, plain)],
    )
    losses = functional.token_losses(X.flatten(0, 1), own, targets)
    torch.testing.assert_close(losses, F.cross_entropy(X.flatten(0, 1) @ plain.T, targets, reduction="none"))


def test_attention_is_causal_and_grouped():
    q, k, v = (torch.randn(2, 6, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    out = attention(q, k, v)
    k[:, 4:], v[:, 4:] = 0, 0
    torch.testing.assert_close(attention(q, k, v)[:, :4], out[:, :4])
    plain = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2))), is_causal=True
    )
    torch.testing.assert_close(attention(q, k, v), plain.transpose(1, 2))


def test_working_precision_of_each_compute_dtype():
    """bf16 activations: 8 bits of mantissa through two layers; the loss is made in fp32."""
    model = tiny().model
    weights = weights_of(model)
    tokens = torch.arange(24).view(2, 12) % 61
    exact = forward({name: w.double() for name, w in weights.items()}, model, tokens)
    for dtype, bound in ((torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
        decoder = Transformer(model, dtype=dtype)
        decoder.place({name: View(w, torch.empty(0)) for name, w in weights.items()})
        with torch.no_grad():
            logits = decoder.logits(decoder(tokens))
        assert logits.dtype == functional.precise(dtype)
        assert (logits.double() - exact).abs().max() / exact.abs().max() < bound


def test_samples_are_the_likeliest_tokens_at_temperature_zero():
    model = tiny().model
    weights = weights_of(model)
    sample = list(islice(generate(weights, [3, 1], model=model, window=12, temperature=0), 15))
    text = [3, 1]
    for token in sample:
        logits = forward({name: w.float() for name, w in weights.items()}, model, torch.tensor([text[-12:]]))
        assert token == int(logits[0, -1].argmax())
        text.append(token)


def test_samples_depend_on_the_seed_only():
    model = tiny().model
    weights = weights_of(model)

    def draw(**options):
        return list(islice(generate(weights, [3], model=model, window=12, **options), 20))

    assert draw(seed=1) == draw(seed=1) != draw(seed=2)
    assert draw(top_k=1) == draw(temperature=0) == draw(temperature=1e-300)
    with pytest.raises(ValueError, match="prompt is empty"):
        next(generate(weights, [], model=model, window=12))
