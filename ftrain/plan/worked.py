"""The founding documents' worked examples, computed rather than copied: small enough to follow with a pencil.

ftrain plan explain CONFIG --topic tp
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

from ftrain.plan.figure import Answer, Section, Value, decimal, number, said, why
from ftrain.plan.setup import DOC_A

Matrix = Sequence[Sequence[int]]

X: Sequence[int] = (2, 3)
W: Matrix = ((1, 0, 1, 1), (0, 1, 1, 2))


def times(x: Sequence[int], w: Matrix) -> list[int]:
    """Row vector times matrix."""
    return [sum(a * row[column] for a, row in zip(x, w, strict=True)) for column in range(len(w[0]))]


def columns(w: Matrix, start: int, stop: int) -> list[list[int]]:
    """Columns [start, stop) of a matrix."""
    return [list(row[start:stop]) for row in w]


def tensor_parallel() -> Section:
    """A matrix cut by columns over two cards: each computes its part of the answer, and joining them changes nothing."""
    a, b = times(X, columns(W, 0, 2)), times(X, columns(W, 2, 4))
    partial = [times(X[i : i + 1], W[i : i + 1]) for i in range(2)]
    summed = [sum(pair) for pair in zip(*partial, strict=True)]
    inputs: dict[str, Value] = {"x": str(list(X)), "W": str([list(row) for row in W])}
    return Section(
        title="Tensor parallelism: one product on two cards",
        figures=(
            said("tp_a", "card A, first two columns", text=str(a), why=why("x W[:, 0:2]", DOC_A, **inputs)),
            said("tp_b", "card B, last two columns", text=str(b), why=why("x W[:, 2:4]", DOC_A, **inputs)),
            said("tp_joined", "joined in order", text=str(a + b), why=why("[A, B] = x W", DOC_A, **inputs)),
            said("tp_row", "cut by rows instead: two partial answers to be added",
                 text=f"{partial[0]} + {partial[1]} = {summed}", why=why("sum over cards of x[i] W[i, :]", DOC_A, **inputs)),
        ),
        notes=("columns then rows: what comes out of the first is what the second takes in, so the pair needs one exchange",),
    )  # fmt: skip


def data_parallel() -> Section:
    """Two replicas with equally many tokens: the mean gradient, and one step of plain descent."""
    start, gradients, rate = 10, (2, 4), Fraction(1, 10)
    mean = Fraction(sum(gradients), len(gradients))
    after = start - rate * mean
    return Section(
        title="Data parallelism: two replicas, one update",
        figures=(
            number("dp_mean", "mean gradient", value=mean, why=why("(2 + 4) / 2, equal weights", DOC_A)),
            number("dp_after", "both replicas afterwards", value=after,
                   why=why("10 - 0.1 x 3 (plain descent, for the sum only; the engine uses AdamW)", DOC_A)),
        ),
        notes=(f"unequal replicas are weighted by their valid tokens; {decimal(after)} holds for equal ones",),
    )  # fmt: skip


def zero1() -> Section:
    """Where the optimizer's records lie between two members, and what moves in an update."""
    d = 2
    kept = {"weights": Fraction(1), "gradients": Fraction(1), "master": Fraction(1, d), "moments": Fraction(1, d)}
    return Section(
        title="ZeRO-1 on two members",
        figures=(
            *(number(f"zero1_{name}", f"{name} kept by a member", value=share, why=why("1, or 1/d of the records", DOC_A, d=d))
              for name, share in kept.items()),
            said("zero1_flow", "an update", text="reduce-scatter gradients -> update own half -> all-gather weights",
                 why=why("each member updates what it alone keeps", DOC_A)),
            number("zero1_sent", "bytes a member sends per parameter", value=Fraction(d - 1, d) * 6, unit="B",
                   why=why("(d-1)/d x (4 B gradients + 2 B weights)", DOC_A, d=d)),
        ),
        notes=("reduce-scatter leaves each member the sum of its part; all-gather gives every member all parts; together they "
               "are an all-reduce",),
    )  # fmt: skip


TOKENS = range(1, 9)
CHOICES = ((0, 2), (2, 1), (1, 0), (3, 2), (0, 1), (2, 3), (3, 0), (1, 3))
WEIGHTS = (Fraction(3, 4), Fraction(1, 4))
EXPERT_CARDS = 2


def expert_parallel() -> Section:
    """Eight tokens and four experts on two cards: expert e makes (e + 1) x of x, each token asks two of them."""
    rows = sorted((expert, place, which) for place, pair in enumerate(CHOICES) for which, expert in enumerate(pair))
    made = {(place, which): (expert + 1) * TOKENS[place] for expert, place, which in rows}
    combined = [sum(weight * made[place, which] for which, weight in enumerate(WEIGHTS)) for place in range(len(TOKENS))]
    each = 4 // EXPERT_CARDS
    sent = [[row for row in rows if row[0] // each == card] for card in range(EXPERT_CARDS)]
    paths = ", ".join(f"{TOKENS[place]}: {first} {second}" for place, (first, second) in enumerate(CHOICES))
    return Section(
        title="Expert parallelism: eight tokens, four experts on two cards",
        figures=(
            said("ep_routed", "the router's choice", text=paths,
                 why=why("the two likeliest of four, weights 3/4 and 1/4", DOC_A)),
            *(said(f"ep_sent_{card}", f"sent to card {'AB'[card]}, sorted by expert",
                   text=" ".join(f"{TOKENS[place]}>{expert}" for expert, place, _ in sent[card]),
                   why=why(f"token>expert, experts {card * each} and {card * each + 1}", DOC_A))
              for card in range(EXPERT_CARDS)),
            *(said(f"ep_made_{card}", f"what card {'AB'[card]} made of them, in that order",
                   text=" ".join(str(made[place, which]) for _, place, which in sent[card]), why=why("(e + 1) x", DOC_A))
              for card in range(EXPERT_CARDS)),
            said("ep_combined", "back, in the tokens' own order", text=" ".join(decimal(value) for value in combined),
                 why=why("3/4 of the first + 1/4 of the second", DOC_A)),
            number("ep_rows", "rows computed", value=len(rows), why=why("tokens x experts per token", DOC_A)),
        ),
        notes=("a drawing follows one path of a token; it takes as many as it has experts (model.experts_per_token)",
               "which cards these are is no new factor: they are neighbours of DP x CP, replicas of everything but experts"),
    )  # fmt: skip


TOPICS: dict[str, Callable[[], Section]] = {"tp": tensor_parallel, "dp": data_parallel, "zero1": zero1, "ep": expert_parallel}


def answer(topic: str) -> Answer:
    """A worked example as an answer."""
    section = TOPICS[topic]()
    return Answer(command="explain", title=section.title, sections=(section,))
