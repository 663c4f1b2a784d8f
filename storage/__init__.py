"""Layout-free checkpoints: few large packs, one index, a Zarr v3 view of it."""
