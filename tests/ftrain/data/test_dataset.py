"""The training stream: a pure function of the position, each window once per pass, the held-out tail never touched.

Most token files here hold their own positions as tokens, so that a batch says where it was read.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftrain.config import Config
from ftrain.data.dataset import Batch, Dataset
from ftrain.data.errors import DataError
from ftrain.data.tokenizer import ByteTokenizer
from ftrain.data.writer import TokenWriter

FileFactory = Callable[..., str]
ConfigFactory = Callable[..., Config]


@pytest.fixture
def blended(counting_file: FileFactory, make_config: ConfigFactory) -> Dataset:
    """Two sources, 0.75 to 0.25: 250 tokens (28 training windows of 8) and 95 (10 windows) in short documents."""
    one = counting_file("one", [50, 3, 1, 96, 100])
    two = counting_file("two", [40, 55], base=10_000)
    return Dataset(make_config([one, two], weights=[0.75, 0.25]), root="unused")


def rows(batch: Batch) -> list[tuple[list[int], list[int], list[bool], int, int]]:
    columns = (batch.tokens, batch.targets, batch.valid, batch.sources, batch.ids)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_a_batch_holds_windows_and_their_targets(blended: Dataset) -> None:
    batch = blended.sequences(0, 100)
    assert batch.tokens.shape == batch.targets.shape == batch.valid.shape == (100, 8)
    assert batch.tokens.dtype == np.int64
    assert batch.valid.dtype == np.bool_
    assert (batch.targets == batch.tokens + 1).all()  # tokens are positions: the target is the next one
    assert (batch.tokens[:, 0] == np.where(batch.sources == 0, 0, 10_000) + 8 * batch.ids).all()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=st.integers(0, 10**9), cuts=st.lists(st.integers(1, 12), min_size=1, max_size=6))
def test_how_a_batch_is_shared_out_does_not_matter(blended: Dataset, first: int, cuts: list[int]) -> None:
    whole = rows(blended.sequences(first, sum(cuts)))
    parts = [rows(blended.sequences(first + sum(cuts[:i]), cut)) for i, cut in enumerate(cuts)]
    assert whole == [row for part in parts for row in part]


def test_two_processes_would_agree(counting_file: FileFactory, make_config: ConfigFactory) -> None:
    config = make_config([counting_file("one", [200])])
    assert rows(Dataset(config, root="a").sequences(7, 30)) == rows(Dataset(config, root="b").sequences(7, 30))


def test_each_window_once_per_pass_of_its_source(blended: Dataset) -> None:
    batch = blended.sequences(0, 4 * 10 * 28)  # 30 passes of the first source, 28 of the second
    for number, windows in ((0, 28), (1, 10)):
        ids = batch.ids[batch.sources == number]
        passes = ids.reshape(-1, windows)
        assert all(sorted(one.tolist()) == list(range(windows)) for one in passes)
        assert len({tuple(one.tolist()) for one in passes}) == len(passes)  # every pass in another order
    assert np.bincount(batch.sources).tolist() == [3 * 280, 280]
    assert blended.train_tokens_per_pass == (28 + 10) * 8


def test_training_never_touches_the_held_out_tail(counting_file: FileFactory, make_config: ConfigFactory) -> None:
    data = Dataset(make_config([counting_file("one", [1000])]), root="unused")
    training = data.sequences(0, 5 * 112)  # five passes
    held = data.heldout(0, data.num_heldout)
    assert data.sources[0].train.stop == 900
    assert max(training.tokens.max(), training.targets.max()) < 900
    assert held.tokens.min() >= 900
    assert sorted(held.tokens[:, 0].tolist()) == list(range(900, 900 + 8 * 12, 8))


def test_another_seed_is_another_order_but_the_same_exam(counting_file: FileFactory, make_config: ConfigFactory) -> None:
    prefix = counting_file("one", [2000])
    zero, one = (Dataset(make_config([prefix], f"run.seed={seed}"), root="unused") for seed in (0, 1))
    assert rows(zero.sequences(0, 20)) != rows(one.sequences(0, 20))
    assert rows(zero.heldout(0, 20)) == rows(one.heldout(0, 20))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=st.integers(0, 500), count=st.integers(1, 60))
def test_the_first_token_of_a_document_is_not_learned(blended: Dataset, first: int, count: int) -> None:
    starts = {0, 50, 53, 54, 150, 10_000, 10_040}  # tokens are positions
    batch = blended.sequences(first, count)
    assert (batch.valid == ~np.isin(batch.targets, list(starts))).all()
    assert blended.num_valid(first, count) == batch.valid.sum()


@pytest.mark.parametrize("isolate", ["true", "false"])
def test_documents_are_counted_within_each_sequence(
    counting_file: FileFactory, make_config: ConfigFactory, isolate: str
) -> None:
    """Documents of 5 tokens, windows of 8: token p of the stream is of document p // 5."""
    config = make_config([counting_file("one", [5] * 40)], f"data.isolate_documents={isolate}", "data.heldout_fraction=0")
    batch = Dataset(config, root="unused").sequences(0, 20)
    documents = batch.tokens // 5  # a counting file's token is its position
    assert np.array_equal(batch.documents, documents - documents[:, :1])


def test_documents_may_be_run_together(counting_file: FileFactory, make_config: ConfigFactory) -> None:
    data = Dataset(make_config([counting_file("one", [5] * 40)], "data.isolate_documents=false"), root="unused")
    assert data.sequences(0, 22).valid.all()
    assert data.num_valid(0, 22) == 22 * 8


def test_byte_documents_end_with_eod_and_the_next_is_not_learned_from_it(tmp_path: Path, make_config: ConfigFactory) -> None:
    tokenizer = ByteTokenizer()
    with TokenWriter(str(tmp_path / "x"), vocab=257) as out:
        for word in ["abc", "defg", "h", "ijklmnopqrstuvw"] * 4:
            out.add([*tokenizer.encode(word), tokenizer.eod])
            out.end_document()
    batch = Dataset(make_config([str(tmp_path / "x")]), root="unused").sequences(0, 12)
    assert ((batch.tokens == tokenizer.eod) == ~batch.valid).all()


def test_a_source_whose_tail_is_too_short_is_not_in_the_exam(counting_file: FileFactory, make_config: ConfigFactory) -> None:
    data = Dataset(make_config([counting_file("one", [50]), counting_file("two", [500], base=1000)]), root="unused")
    assert data.num_heldout == 6
    assert set(data.heldout(0, 6).sources.tolist()) == {1}
    assert set(data.sequences(0, 8).sources.tolist()) == {0, 1}
    with pytest.raises(DataError, match=r"held-out sequences \[0, 7\) of 6"):
        data.heldout(0, 7)


def test_identity_tells_corpora_apart(counting_file: FileFactory, make_config: ConfigFactory) -> None:
    files = [
        counting_file("a", [500]),
        counting_file("b", [500], base=1),
        counting_file("c", [250, 250]),
        counting_file("d", [501]),
    ]
    found = [Dataset(make_config([prefix]), root="unused").identity for prefix in files]
    assert len(set(found)) == len(files)
    assert Dataset(make_config([files[0]], "run.seed=5"), root="unused").identity == found[0]


def test_unusable_data_is_a_clear_error(counting_file: FileFactory, make_config: ConfigFactory) -> None:
    with pytest.raises(DataError, match=r"short: has 8 training tokens of 8, one sequence needs 9: data.seq_len = 7 or less"):
        Dataset(make_config([counting_file("short", [8])]), root="unused")
    prefix = counting_file("one", [400])
    with pytest.raises(DataError, match=r"evaluate.sequences = 64, .*leaves 4 held-out sequences"):
        Dataset(make_config([prefix], "evaluate.every_steps=1"), root="unused")
    without = r"leaves 0 held-out sequences of 300 tokens: set data.seq_len = 9 or less, or evaluate.every_steps = 0"
    with pytest.raises(DataError, match=without):  # 40 tokens are held out: 4 sequences of 9, each with a target for its last
        Dataset(make_config([prefix], "evaluate.every_steps=1", "evaluate.sequences=4", "data.seq_len=300"), root="unused")
    with pytest.raises(DataError, match=r"one: holds token \d+, model.vocab is 300: another tokenizer made it"):
        Dataset(make_config([prefix], "model.vocab=300"), root="unused").sequences(0, 44)
    with pytest.raises(DataError, match=r"nothing\.idx: cannot be read"):
        Dataset(make_config([prefix.replace("one", "nothing")]), root="unused")
    with pytest.raises(ValueError, match="start at 0"):
        Dataset(make_config([prefix]), root="unused").sequences(-1, 3)


def test_the_order_is_part_of_every_saved_run(blended: Dataset) -> None:
    """Pinned: another result here means that resumed runs see other data."""
    batch = blended.sequences(1000, 6)
    assert list(zip(batch.sources.tolist(), batch.ids.tolist(), strict=True)) == [
        (1, 8),
        (0, 0),
        (0, 17),
        (0, 3),
        (0, 26),
        (1, 0),
    ]


def cross_entropy(pairs: list[tuple[int, int]], train: list[int], vocab: int, order: int) -> float:
    """The definition in `ftrain.data.entropy`, by counting in Python."""
    singles, doubles, first = Counter(train[:-1]), Counter(itertools.pairwise(train)), len(train) - 1
    total = 0.0
    for a, b in pairs:
        p = (singles[b] + 1) / (first + vocab) if order == 1 else (doubles[a, b] + 1) / (singles[a] + vocab)
        total -= math.log(p)
    return total / len(pairs)


def test_entropies_are_what_their_definition_says(tmp_path: Path, make_config: ConfigFactory) -> None:
    text = "the cat sat on the mat; the dog ran to the cat. " * 12
    tokenizer = ByteTokenizer()
    ids = [*tokenizer.encode(text), tokenizer.eod] * 2
    with TokenWriter(str(tmp_path / "x"), vocab=257) as out:
        for document in (ids[: len(ids) // 2], ids[len(ids) // 2 :]):
            out.add(document)
            out.end_document()
    data = Dataset(make_config([str(tmp_path / "x")], "model.vocab=257"), root="unused")
    train = ids[: data.sources[0].train.stop]
    for sequences in (3, None):
        held = data.heldout(0, sequences or data.num_heldout)
        pairs = list(zip(held.tokens[held.valid].tolist(), held.targets[held.valid].tolist(), strict=True))
        for order, found in ((2, data.bigram_entropy(sequences=sequences)), (1, data.unigram_entropy(sequences=sequences))):
            assert found == pytest.approx(cross_entropy(pairs, train, 257, order), rel=1e-12)
    assert data.bigram_entropy() < data.unigram_entropy()


def test_entropy_of_a_uniform_source_is_the_logarithm(tmp_path: Path, make_config: ConfigFactory) -> None:
    """Independent uniform tokens cannot be predicted: both entropies are ln 16, up to sampling (8000 pairs per row)."""
    with TokenWriter(str(tmp_path / "x"), vocab=16) as out:
        out.add(np.random.default_rng(3).integers(0, 16, 128_000))
    data = Dataset(make_config([str(tmp_path / "x")], "model.vocab=16"), root="unused")
    assert data.unigram_entropy() == pytest.approx(math.log(16), abs=2e-3)
    assert data.bigram_entropy() == pytest.approx(math.log(16), abs=5e-3)


def test_a_blend_counts_each_source_by_its_weight(tmp_path: Path, make_config: ConfigFactory) -> None:
    """One source of zeros, one of ones, nine times longer: at equal weights both are equally likely: ln 2, but for
    the smoothing."""
    for name, token, length in (("zeros", 0, 2000), ("ones", 1, 18_000)):
        with TokenWriter(str(tmp_path / name), vocab=2) as out:
            out.add(np.full(length, token))
    data = Dataset(make_config([str(tmp_path / "zeros"), str(tmp_path / "ones")], "model.vocab=2"), root="unused")
    assert data.unigram_entropy() == pytest.approx(math.log(2), abs=1e-6)


def test_entropy_of_large_vocabularies_and_of_nothing_is_refused(
    counting_file: FileFactory, make_config: ConfigFactory
) -> None:
    prefix = counting_file("one", [400])
    with pytest.raises(DataError, match="too large; at most 4096"):
        Dataset(make_config([prefix]), root="unused").bigram_entropy()
    with pytest.raises(DataError, match="no held-out text"):
        Dataset(make_config([prefix], "model.vocab=500", "data.heldout_fraction=0"), root="unused").bigram_entropy()
