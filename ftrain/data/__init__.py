"""From text to batches: token files, a keyed order, blends; a global batch is a pure function of its position."""
