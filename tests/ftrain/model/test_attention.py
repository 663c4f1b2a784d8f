"""Blocks of attention and their merging, against softmax written out over all keys; no processes."""

import pytest
import torch

from ftrain.model import attention as module
from ftrain.model import kernels
from ftrain.model.attention import Merged, attention, block_attention, block_attention_backward, merge, seen
from ftrain.parallel.context import head_tail, take

B, H, G, K = 2, 6, 2, 8


def numbers(*shape, seed, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def operands(length, dtype=torch.float64):
    return numbers(B, length, H, K, seed=1, dtype=dtype), *(numbers(B, length, G, K, seed=n, dtype=dtype) for n in (2, 3))


def documents_of(length):
    """Of unequal lengths, other ones in each sequence."""
    return (torch.rand(B, length, generator=torch.Generator().manual_seed(9)) < 0.25).cumsum(1)


def visible(q_pos, k_pos, doc=None):
    queries, keys = (torch.tensor([p for span in spans for p in span]) for spans in (q_pos, k_pos))
    seen = (queries[:, None] >= keys).expand(B, -1, -1)
    return seen if doc is None else seen & (doc[0][:, :, None] == doc[1][:, None, :])


def written_out(q, k, v, mask_BTS):
    """The oracle: output and lse, differentiable; rows that see nothing are 0 and -inf."""
    k, v = (x.repeat_interleave(H // G, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bqhk", q, k) / K**0.5
    scores = scores.masked_fill(~mask_BTS[:, :, None], float("-inf"))
    weights = scores.softmax(-1).nan_to_num(0)
    return torch.einsum("bqhk,bkhd->bqhd", weights, v), scores.logsumexp(-1)


POSITIONS = {
    "the same": ((range(3, 9),), (range(3, 9),)),
    "earlier keys": ((range(8, 12), range(20, 23)), (range(2, 9),)),
    "a part": ((range(4, 8), range(12, 16)), (range(6), range(13, 15))),
    "in runs": ((range(2, 4), range(9, 11)), (range(2, 4), range(9, 11))),
    "nothing for some": ((range(4), range(9, 12)), (range(6, 10),)),
    "nothing at all": ((range(4),), (range(6, 10),)),
}


def of(spans):
    return sum(map(len, spans))


@pytest.mark.parametrize("device", ["fused", "written out"])
@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize("positions", POSITIONS)
def test_a_block_is_attention_of_its_positions(positions, with_documents, device, monkeypatch):
    if device == "written out":
        monkeypatch.setattr(kernels, "_fused", kernels.written_out)
        monkeypatch.setattr(kernels, "_flash_backward", plain_backward)
    q_pos, k_pos = POSITIONS[positions]
    q, k, v = numbers(B, of(q_pos), H, K, seed=1), *(numbers(B, of(k_pos), G, K, seed=n) for n in (2, 3))
    whole = documents_of(32)
    doc = (take(whole, q_pos), take(whole, k_pos)) if with_documents else None
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected, lse_expected = written_out(*leaves, visible(q_pos, k_pos, doc))
    out, lse = block_attention(q, k, v, q_pos, k_pos, doc)
    torch.testing.assert_close(out, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, lse_expected.detach(), rtol=1e-12, atol=1e-12)
    dout = numbers(*out.shape, seed=4)
    grads = block_attention_backward(Merged(dout, out, lse), (q, k, v), q_pos, k_pos, doc)
    expected.backward(dout)
    for ours, leaf in zip(grads, leaves, strict=True):
        torch.testing.assert_close(ours, leaf.grad, rtol=1e-12, atol=1e-12)


def plain_backward(dout, q, k, v, out, lse, dropout, causal, *, attn_mask):
    return kernels.written_out_backward(dout, kernels.Heads(q, k, v), out, lse, causal=causal, mask=attn_mask)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_blocks_merge_to_the_whole(size, with_documents, dtype):
    """Every rank's rows over everybody's blocks, in the ring's order; gradients from the merged output and lse."""
    length = 24
    q, k, v = operands(length, dtype)
    doc = documents_of(length) if with_documents else None
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    everything = (range(length),)
    expected, lse_expected = written_out(*exact, visible(everything, everything, None if doc is None else (doc, doc)))
    dout = numbers(*expected.shape, seed=4, dtype=dtype)
    expected.backward(dout.double())
    grads = [torch.zeros_like(x.detach()) for x in exact]
    for rank in range(size):
        mine = head_tail(length, size, rank)
        index = [p for span in mine for p in span]
        out, lse = torch.zeros_like(q[:, index]), torch.full(q[:, index].shape[:-1], float("-inf"), dtype=dtype)
        blocks = [(seen(mine, head_tail(length, size, (rank - step) % size))) for step in range(size)]
        parts = [(take(q, block.q_pos), take(k, block.k_pos), take(v, block.k_pos)) for block in blocks]
        for block, part in zip(blocks, parts, strict=True):
            merge(
                out[:, block.rows],
                lse[:, block.rows],
                *block_attention(*part, block.q_pos, block.k_pos, block.documents(doc)),
            )
        tolerance = 1e-12 if dtype == torch.float64 else 2e-5
        torch.testing.assert_close(out.double(), expected[:, index].detach(), rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(lse.double(), lse_expected[:, index].detach(), rtol=tolerance, atol=tolerance)
        merged = Merged(dout[:, index], out, lse)
        for block, part in zip(blocks, parts, strict=True):
            found = block_attention_backward(merged.rows(block.rows), part, block.q_pos, block.k_pos, block.documents(doc))
            for whole, own, spans in zip(grads, found, (block.q_pos, block.k_pos, block.k_pos), strict=True):
                whole[:, [p for span in spans for p in span]] += own.double()
    for ours, leaf in zip(grads, exact, strict=True):
        torch.testing.assert_close(ours, leaf.grad, rtol=tolerance, atol=tolerance)


def test_a_row_that_sees_nothing_merges_without_a_nan():
    nothing = (torch.zeros(1, 2, 1, 4), torch.full((1, 2, 1), float("-inf")))
    something = (torch.tensor([[[[1.0, 2, 3, 4]], [[5.0, 6, 7, 8]]]]), torch.tensor([[[0.5], [-3.0]]]))
    for first, second, expected in (
        (nothing, nothing, nothing),
        (nothing, something, something),
        (something, nothing, something),
    ):
        out, lse = (x.clone() for x in first)
        merge(out, lse, *second)
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])


def test_a_row_that_sees_nothing_anywhere_has_no_gradients():
    q, k, v = operands(4)
    q_pos, k_pos = (range(4),), (range(10, 14),)
    out, lse = block_attention(q, k, v, q_pos, k_pos)
    assert (out.abs().max(), lse.max()) == (0, float("-inf"))
    grads = block_attention_backward(Merged(torch.ones_like(out), out, lse), (q, k, v), q_pos, k_pos)
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in grads)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_head_and_tail_give_every_rank_the_same_work(size):
    """Pairs of a query and a key that it sees, over all blocks and within each step of the ring."""
    length = 16 * size
    places = [head_tail(length, size, rank) for rank in range(size)]
    assert sorted(p for spans in places for span in spans for p in span) == list(range(length))
    work = [[visible(mine, theirs)[0].sum().item() for theirs in places] for mine in places]
    assert len({sum(row) for row in work}) == 1
    assert sum(map(sum, work)) == length * (length + 1) // 2
    for step in range(size):
        assert len({work[rank][(rank - step) % size] for rank in range(size)}) == 1


@pytest.mark.parametrize("size", [2, 4])
def test_blocks_of_other_ranks_need_no_mask(size, monkeypatch):
    """What is left of them once invisible rows and keys are cut off is a plain rectangle."""
    found = []
    monkeypatch.setattr(
        kernels,
        "forward",
        lambda heads, *, causal, mask: found.append((causal, mask)) or kernels.written_out(heads, causal, mask),
    )
    q, k, v = operands(16)
    for rank in range(size):
        for source in range(size):
            block = seen(head_tail(16, size, rank), head_tail(16, size, source))
            block_attention(take(q, block.q_pos), take(k, block.k_pos), take(v, block.k_pos), block.q_pos, block.k_pos)
            assert found.pop() == (rank == source, None)


def test_one_process_stays_within_documents():
    q, k, v = operands(12)
    doc = documents_of(12)
    everything = (range(12),)
    expected, _ = written_out(q, k, v, visible(everything, everything, (doc, doc)))
    torch.testing.assert_close(attention(q, k, v, None, doc), expected, rtol=1e-12, atol=1e-12)
    plain, _ = written_out(q, k, v, visible(everything, everything))
    torch.testing.assert_close(attention(q, k, v), plain, rtol=1e-12, atol=1e-12)


def test_positions_that_do_not_divide_are_an_error():
    with pytest.raises(ValueError, match="cuts 10 positions into 2 x 4 pieces: they must divide"):
        head_tail(10, 4, 0)


def test_rotary_tables_are_those_of_the_positions():
    whole = module.rotary_tables((range(16),), 8, 10_000.0, torch.float64, torch.device("cpu"))
    spans = head_tail(16, 2, 0)
    own = module.rotary_tables(spans, 8, 10_000.0, torch.float64, torch.device("cpu"))
    index = [p for span in spans for p in span]
    assert all(torch.equal(ours, table[index]) for ours, table in zip(own, whole, strict=True))
