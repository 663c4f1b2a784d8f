"""Bytes of the training state, in the ideal even split: the founding documents' arithmetic, exact.

Two conventions are in use and are often mixed. ZeRO counts 16 bytes a parameter (2 weight + 2 gradient + 12 optimizer);
accumulating gradients in fp32, as Megatron and this engine do, makes it 18. Both are printed, never one for the other.
The optimizer is divided by DP x CP: context parallel ranks hold the same weights, so they share its records as well.
Dividing by DP alone (Megatron's own estimator does) is the first trap of the founding rows. Experts that are shared out over EP
ranks have a denominator of their own: only DP x CP / EP ranks hold the same ones.
"""

from __future__ import annotations

from fractions import Fraction

from ftrain.parallel.shape import MeshShape
from ftrain.plan.figure import Figure, Section, Table, Value, Why, decimal, nbytes, number, percent, said, size, why
from ftrain.plan.setup import DOC_A, DOC_B, MEGATRON_MEMORY, ZERO, Setup, layout

WEIGHT, GRADIENT, MASTER, MOMENTS = 2, 4, 4, 8
"""Bytes of a parameter: bf16 weight, fp32 gradient, fp32 master, two fp32 Adam moments."""

STATE = WEIGHT + GRADIENT + MASTER + MOMENTS
ZERO_STATE = 16
"""2 weight + 2 gradient + 12 optimizer: the ZeRO paper's count, with bf16 gradients."""


def shares(setup: Setup) -> dict[str, int]:
    """By how much each kind of memory is divided beyond TP x PP."""
    mesh, options = setup.mesh, setup.options
    if options.sharding == "zero1":
        return {"weights": 1, "gradients": 1, "master": mesh.shards, "moments": mesh.shards}
    inner = mesh.shards if options.sharding == "fsdp" else options.inner
    outer = inner if options.sharding == "hsdp" else mesh.shards
    return {"weights": inner, "gradients": inner, "master": outer, "moments": outer}


def expert_shares(setup: Setup) -> dict[str, int]:
    """The same for the parameters of experts: so many ranks of DP x CP have others, and share no records of these."""
    return {kind: max(1, share // setup.mesh.ep) for kind, share in shares(setup).items()}


def bytes_per_param(split: dict[str, int]) -> Fraction:
    """Bytes a rank keeps for each parameter of its TP x PP shard."""
    widths = {"weights": WEIGHT, "gradients": GRADIENT, "master": MASTER, "moments": MOMENTS}
    return sum((Fraction(width, split[kind]) for kind, width in widths.items()), start=Fraction(0))


def whole(setup: Setup) -> Section:
    """What the state of the whole model weighs, on one imaginary card."""
    n, memory = setup.num_params, setup.profile.memory_bytes
    gpus = setup.profile.server.gpus
    cards = Fraction(WEIGHT * n, memory)
    return Section(
        title="The whole model",
        figures=(
            number("params", "parameters", value=n, why=why("from the model's shape, or --params", "config", N=n)),
            *_experts(setup),
            nbytes("weights", "compute weights", value=WEIGHT * n, why=why("N x 2 B", DOC_A, N=n)),
            nbytes("state_16", "state at 16 B (ZeRO)", value=ZERO_STATE * n, why=why("N x (2 + 2 + 12) B", ZERO, N=n)),
            nbytes("state_18", "state at 18 B (fp32 gradients)", value=STATE * n, why=why("N x 18 B", MEGATRON_MEMORY, N=n)),
            number("card_gb", "memory of one card", value=Fraction(memory, 10**9), unit="GB",
                   why=why("from the hardware profile", setup.profile.sources["gpu"])),
            number("server_gb", "memory of a server (not pooled: a card sees its own)", value=Fraction(gpus * memory, 10**9),
                   unit="GB", why=why("cards x memory", DOC_A, cards=gpus, memory=memory)),
            number("cards_weights", "cards that the weights alone fill", value=cards, digits=3,
                   why=why("N x 2 B / memory", DOC_B, N=n, memory=memory)),
            number("cards_weights_whole", "so at least", value=-(-cards.numerator // cards.denominator), unit="cards",
                   why=why("rounded up", DOC_B)),
            number("cards_state_16", "cards that 16 B a parameter fill, before activations",
                   value=-(-ZERO_STATE * n // memory), unit="cards",
                   why=why("ceil(N x 16 B / memory)", DOC_B, N=n, memory=memory)),
        ),
    )  # fmt: skip


def _experts(setup: Setup) -> tuple[Figure, ...]:
    """Whose parameters they are, and how many of them a token meets."""
    model = setup.config.model
    if not model.experts:
        return ()
    return (
        number("expert_params", "of these in experts", value=setup.expert_params, digits=0,
               why=why("3 h f E L", "config", h=model.hidden, f=model.ffn, E=model.experts, L=model.layers)),
        number("active_params", "parameters that compute a token", value=setup.active_params,
               why=why("N - 3 h f (E - k) L", "Mixtral of Experts, arXiv 2401.04088", N=setup.num_params, E=model.experts,
                       k=model.experts_per_token)),
    )  # fmt: skip


def per_card(setup: Setup) -> Section:
    """What one card keeps, if every cut were even and nothing were replicated."""
    n, mesh, split = setup.num_params, setup.mesh, shares(setup)
    common, experts = _parts(setup)
    local, per_param = common + experts, bytes_per_param(split)
    state = common * per_param + experts * bytes_per_param(expert_shares(setup))
    d, rule = mesh.shards, _rule(setup)
    cut, by_rule = "N / (tp x pp)", f"N / (tp x pp) x ({rule})"
    given: dict[str, Value] = {"N": n, "tp": mesh.tp, "pp": mesh.pp}
    if mesh.ep > 1:
        given |= {"E": setup.expert_params, "ep": mesh.ep}
        cut = "((N - E) / (tp x pp) + E / (tp x pp x ep))"
        by_rule = f"(N - E) / (tp x pp) x ({rule}) + E / (tp x pp x ep) x (6 + 12 ep/d)"
    return Section(
        title="One card, ideal even split",
        figures=(
            said("layout", "layout", text=layout(mesh), why=why("TP x CP x PP x DP; EP never multiplies", DOC_A)),
            number("replicas", "replicas (DP)", value=mesh.dp,
                   why=why("ranks / (tp x cp x pp)", DOC_A, ranks=mesh.world, tp=mesh.tp, cp=mesh.cp, pp=mesh.pp)),
            number("replica_cards", "cards of a replica", value=mesh.world // mesh.dp, why=why("tp x cp x pp", DOC_A)),
            number("servers", "servers", value=-(-mesh.world // setup.profile.server.gpus),
                   why=why("ranks / cards of a server", DOC_A, ranks=mesh.world, cards=setup.profile.server.gpus)),
            number("optimizer_divisor", "optimizer records divided by DP x CP", value=d,
                   why=why("dp x cp: context parallel ranks hold the same weights", "Megatron intra_dp_cp_group",
                           dp=mesh.dp, cp=mesh.cp)),
            _local_params(local, why=why(cut, DOC_A, **given)),
            nbytes("state_unsharded", "state with nothing sharded over replicas", value=local * STATE,
                   why=why(f"{cut} x 18 B", DOC_A, **given)),
            number("bytes_per_param", f"bytes a parameter, {setup.options.sharding}", value=per_param, unit="B",
                   why=why(rule, MEGATRON_MEMORY, d=d)),
            *_expert_divisor(setup),
            nbytes("state", f"state, {setup.options.sharding}", value=state, digits=None if mesh.ep == 1 else 6,
                   why=why(by_rule, DOC_A, **given, d=d)),
            number("zero_claim_bytes", "16 B convention, optimizer alone sharded", value=4 + Fraction(12, d), unit="B",
                   why=why("2 + 2 + 12/d", ZERO, d=d)),
            percent("zero_claim_share", "of the unsharded 16 B", value=(4 + Fraction(12, d)) / 16,
                    why=why("(4 + 12/d) / 16", ZERO, d=d)),
        ),
        tables=_state_tables(setup),
        notes=_denominator_note(mesh),
    )  # fmt: skip


def _local_params(local: Fraction, *, why: Why) -> Figure:
    """In billions, where it is one or more; a small model's are counted out, for 0.0009 B reads like bytes."""
    label = "parameters of a card"
    if local >= 10**9:
        return number("local_params", f"{label} (B: billion)", value=local / 10**9, unit="B", why=why)
    return Figure(key="local_params", label=label, value=local / 10**9, text=decimal(local, digits=0), why=why)


def _parts(setup: Setup) -> tuple[Fraction, Fraction]:
    """A card's parameters: those that all replicas have alike, and those of its experts. Without EP all are alike."""
    cut = setup.mesh.tp * setup.mesh.pp
    if setup.mesh.ep == 1:
        return Fraction(setup.num_params, cut), Fraction(0)
    return (setup.num_params - setup.expert_params) / cut, setup.expert_params / (cut * setup.mesh.ep)


def _expert_divisor(setup: Setup) -> tuple[Figure, ...]:
    mesh = setup.mesh
    if mesh.ep == 1:
        return ()
    same = mesh.shards // mesh.ep
    return (
        number("expert_divisor", "optimizer records of experts divided by DP x CP / EP", value=same,
               why=why("dp x cp / ep: the others hold other experts", MEGATRON_MEMORY, dp=mesh.dp, cp=mesh.cp, ep=mesh.ep)),
        number("expert_bytes_per_param", "bytes a parameter of an expert", value=6 + Fraction(12, same), unit="B",
               why=why("6 + 12 ep/d", MEGATRON_MEMORY, d=mesh.shards, ep=mesh.ep)),
    )  # fmt: skip


def _rule(setup: Setup) -> str:
    inner = setup.options.inner
    rules = {"zero1": "6 + 12/d", "fsdp": "18/d", "hsdp": f"18/{inner}", "hfsdp": f"6/{inner} + 12/d"}
    return rules[setup.options.sharding]


def _state_tables(setup: Setup) -> tuple[Table, ...]:
    """Experts that are shared out have a table of their own."""
    mesh, (common, experts) = setup.mesh, _parts(setup)
    over = {1: "whole on each replica", mesh.shards: f"DP x CP = {mesh.dp} x {mesh.cp}"}
    rule = "N / (tp x pp)" if mesh.ep == 1 else "(N - E) / (tp x pp)"
    alike = _state_table("state_kinds", "Four records of a parameter", shares(setup), over, common, rule)
    if mesh.ep == 1:
        return (alike,)
    over = {1: "whole, of 1 in ep experts", mesh.shards // mesh.ep: f"DP x CP / EP = {mesh.dp} x {mesh.cp} / {mesh.ep}"}
    title, rule = "Four records of an expert's parameter", "E / (tp x pp x ep)"
    return alike, _state_table("expert_state_kinds", title, expert_shares(setup), over, experts, rule)


def _state_table(key: str, title: str, split: dict[str, int], over: dict[int, str], local: Fraction, rule: str) -> Table:
    kinds = (
        ("weights", "bf16", WEIGHT),
        ("gradients", "fp32", GRADIENT),
        ("master", "fp32", MASTER),
        ("moments", "2 x fp32", MOMENTS),
    )
    rows = tuple(
        (
            kind,
            dtype,
            width,
            f"1/{split[kind]}",
            over.get(split[kind], f"inner group of {split[kind]}"),
            size(local * width / split[kind]),
        )
        for kind, dtype, width in kinds
    )
    return Table(
        key=key,
        title=title,
        columns=("record", "stored as", "bytes a parameter", "part kept", "split over", "on a card"),
        rows=rows,
        formulas={"on a card": f"{rule} x bytes x part"},
        source=DOC_A,
    )


def _denominator_note(mesh: MeshShape) -> tuple[str, ...]:
    if mesh.cp == 1:
        return ()
    naive = 6 + Fraction(12, mesh.dp)
    return (
        f"the optimizer is divided by DP x CP = {mesh.shards}; 6 + 12/{mesh.dp} = {float(naive):g} B would divide by DP alone, "
        "as Megatron's memory estimator does, and be too large",
    )
