"""Training that goes on from a checkpoint: under another layout as one process would have, under the same one bit for bit."""

from functools import partial

import torch
from layouts import Run, deviations, laid_out, one_process, run_layouts
from mixed import from_storage, tiers_in, trained

BEFORE, AFTER = 2, 2
"""Steps before a checkpoint and after it."""


def goes_on(config, tiers, layouts):
    """Whether what was saved BEFORE steps into the training of `config` goes on, under each of these layouts, as if one process
    had done it all."""
    (unbroken,) = run_layouts([one_process(config)], BEFORE + AFTER)
    expected = Run(results=unbroken.results[BEFORE:], grads=unbroken.grads, state=unbroken.state, loss=unbroken.loss)
    for ranks in sorted({layout["ranks"] for layout in layouts}):
        configs = [laid_out(config, **layout) for layout in layouts if layout["ranks"] == ranks]
        for run in run_layouts(configs, AFTER, partial(from_storage, tiers)):
            found = deviations(run, expected)
            assert max(found.values()) < 1e-12, found


def goes_on_bit_for_bit(config, folder):
    """Whether `config`, saved and loaded, trains on as if nothing had happened."""
    tiers = tiers_in(folder, "same")
    trained(config, BEFORE, tiers)
    (unbroken,) = run_layouts([config], BEFORE + AFTER)
    (resumed,) = run_layouts([config], AFTER, partial(from_storage, tiers))
    assert (resumed.results, resumed.loss) == (unbroken.results[BEFORE:], unbroken.loss)
    for slot, arrays in unbroken.state.items():
        assert all(torch.equal(resumed.state[slot][name], array) for name, array in arrays.items())
