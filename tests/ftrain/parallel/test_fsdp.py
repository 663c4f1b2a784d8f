"""FSDP: the same function as ZeRO-1 and as one process, the same state in other boxes."""

import itertools

import msgspec
import pytest
import torch

from ftrain.checkpoint.layout import layout_text, rank_layout
from ftrain.parallel.layout import local_box, parameters
from ftrain.parallel.shape import MeshShape, mesh_shape
from ftrain.parallel.shards import Shards
from tests.engines import engine_of, train
from tests.layouts import _merged, deviations, laid_out, one_process, run_layouts, train_here
from tests.tiny import tiny
from tests.world import run_world

LAYOUTS = (
    {"sharding": "fsdp"},
    {"sharding": "fsdp", "tp": 2},
    {"sharding": "fsdp", "pp": 2},
    {"sharding": "fsdp", "cp": 2, "cp_exchange": "ring"},
    {"sharding": "hsdp", "fsdp_inner": 2},
    {"sharding": "hfsdp", "fsdp_inner": 2},
)
STEPS = 2


def config(dtype="float64", **changes):
    """A vocabulary and a width that no number of members divides."""
    base = {
        "model": {"layers": 2, "vocab": 61, "ffn": 50},
        "data": {"seq_len": 16},
        "evaluate": {"sequences": 8},
        "machine": {"compute_dtype": dtype},
    }
    return tiny(**(base | changes))


def name_of(layout):
    return "-".join(f"{key}={value}" for key, value in layout.items())


def _everything(rank, configs, halved):
    """Training under each layout, and whether the live pieces are what the planner says of this place; weights in use."""
    found = []
    for each in configs:
        found.append(train_here(rank, each, STEPS))
        engine = engine_of(each, rank)
        planned = [(part.array, part.box) for part in rank_layout(each, engine.mesh.coordinate).parts]
        assert planned == [(piece.array, piece.box) for piece in engine.pieces() if piece.owner]
    return found, [_gathered(rank, each) for each in halved]


def _gathered(rank, own):
    """The weights that forward reads after an update: the rounded masters, which themselves are something else."""
    engine = engine_of(own, rank)
    train(engine, 1)
    masters = {p.array.removeprefix("master/"): p for p in engine.pieces() if p.array.startswith("master/")}
    found = {}
    for module in engine.passes.modules.values():
        for unit in (module, *module.layers.values()):
            unit.unshard()
        for name, parameter in module.named_parameters():
            assert parameter.dtype == torch.float32  # so that its gradient is
            if name in masters:
                box, rows = masters[name].box, masters[name].tensor
                assert torch.equal(parameter[box.slices()], rows.bfloat16().float()), name
                assert not torch.equal(rows, rows.bfloat16().float()), name
            found[name] = parameter.detach().clone()
    return found


HALVED = ({"sharding": "fsdp"}, {"sharding": "hfsdp", "fsdp_inner": 2})


@pytest.fixture(scope="module")
def world():
    """One world for all of it: starting one costs more than what it does."""
    configs = [laid_out(config(), ranks=4, **layout) for layout in LAYOUTS]
    return run_world(_everything, 4, configs, [laid_out(config("float32"), ranks=4, **layout) for layout in HALVED])


@pytest.fixture(scope="module")
def runs(world):
    found = {name_of(layout): _merged([trained[n] for trained, _ in world]) for n, layout in enumerate(LAYOUTS)}
    return {None: run_layouts([one_process(config())], STEPS)[0], **found}


@pytest.mark.dist
@pytest.mark.parametrize("layout", [name_of(layout) for layout in LAYOUTS])
def test_it_is_one_process_in_fp64(layout, runs):
    found = deviations(runs[layout], runs[None])
    assert max(found.values()) < 1e-12, found


@pytest.mark.dist
def test_what_forward_reads_is_the_rounded_masters(world):
    """Each rank has held what it gathered against its own masters; here, that all have gathered the same."""
    for number in range(len(HALVED)):
        first, *others = (gathered[number] for _, gathered in world)
        assert all(torch.equal(first[name], other[name]) for other in others for name in first)


@pytest.mark.dist
@pytest.mark.slow
def test_fp32_is_as_near_to_zero1_as_sums_in_another_order():
    """One update: the next one would see weights whose rounding fell on the other side."""
    ours, theirs = run_layouts([laid_out(config("float32"), ranks=2, sharding=s) for s in ("fsdp", "zero1")], 1)
    assert max(deviations(ours, theirs).values()) < 2e-5


MODELS = (
    config().model,
    msgspec.structs.replace(config().model, vocab=257, kv_heads=2, qk_norm=True, ffn=52),
)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("tp", "pp", "dp", "cp"), [(1, 1, 2, 1), (1, 1, 3, 2), (2, 2, 4, 1), (4, 1, 1, 8), (1, 2, 10, 1)])
def test_boxes_tile_every_array_once_and_lie_on_its_grid(model, tp, pp, dp, cp):
    """Pure: what all places keep, and what the writers among them write."""
    mesh = MeshShape(tp=tp, pp=pp, dp=dp, cp=cp)
    if model.ffn % tp:
        model = msgspec.structs.replace(model, ffn=52)
    specs = parameters(model, mesh)
    inners = [n for n in range(2, mesh.shards) if mesh.shards % n == 0]
    for inner, split in [(mesh.shards, False), *itertools.product(inners, (False, True))]:
        shards = Shards(mesh, inner, split)
        units = shards.row_units(specs)
        written = {spec.name: torch.zeros(spec.shape, dtype=torch.int32) for spec in specs}
        for place in mesh.coordinates():
            for name, box in shards.state_boxes(specs, place):
                written[name][box.slices()] += 1
                assert box.offset[0] % units[name] == 0
            for spec in specs:
                held, kept = shards.held(spec, place), shards.kept(spec, place)
                whole = local_box(spec, mesh, place) if place.pp in spec.stages else None
                if kept is not None:
                    assert held is not None
                    assert whole is not None
                    assert whole.offset[0] <= held.offset[0] <= kept.offset[0] < kept.stop[0] <= held.stop[0] <= whole.stop[0]
        assert all((count == 1).all() for count in written.values())


def test_an_odd_cut_leaves_the_last_members_less_or_nothing():
    mesh = MeshShape(dp=4)
    (spec,) = [spec for spec in parameters(config().model, mesh) if spec.name == "embedding"]
    rows = [shards_rows(Shards(mesh, 4), spec, place) for place in mesh.coordinates()]
    assert rows == [(0, 16), (16, 32), (32, 48), (48, 61)]
    few = msgspec.structs.replace(config().model, vocab=5)
    (spec,) = [spec for spec in parameters(few, mesh) if spec.name == "embedding"]
    assert [shards_rows(Shards(mesh, 4), spec, place) for place in mesh.coordinates()] == [(0, 2), (2, 4), (4, 5), None]


def shards_rows(shards, spec, place):
    box = shards.held(spec, place)
    return None if box is None else (box.offset[0], box.stop[0])


def _few_rows(rank, own):
    return [result.loss for result in train(engine_of(own, rank), 2)]


@pytest.mark.dist
@pytest.mark.slow
def test_members_without_a_row_train_along():
    """Heads of 2 elements with QK-norm: of four members two have none of its rows."""
    own = config(model={"layers": 1, "hidden": 8, "heads": 4, "kv_heads": 2, "qk_norm": True, "vocab": 61, "ffn": 10})
    (one,) = run_layouts([one_process(own)], 2)
    for layout in ({"sharding": "fsdp"}, {"sharding": "hfsdp", "fsdp_inner": 2}):
        for losses in run_world(_few_rows, 4, laid_out(own, ranks=4, **layout)):
            assert losses == pytest.approx([result.loss for result in one.results], rel=1e-12)


def test_the_mesh_is_the_placement_s():
    """Inner groups are neighbours among the replicas, whatever lies between them in the order of ranks."""
    own = laid_out(config(), ranks=8, tp=2, sharding="hsdp", fsdp_inner=2)
    mesh = mesh_shape(own)
    shards = Shards.of(mesh, own.parallel)
    assert [shards.place(mesh.coordinate(rank)) for rank in range(8)] == [
        (0, 0),
        (0, 0),
        (0, 1),
        (0, 1),
        (1, 0),
        (1, 0),
        (1, 1),
        (1, 1),
    ]
    assert layout_text(own) == "tp2 x cp1 x pp1 x dp4, hsdp in groups of 2"
    assert layout_text(one_process(config())) == "tp1 x cp1 x pp1 x dp1"
