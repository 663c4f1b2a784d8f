"""Where every parameter lives: mesh, placement, buckets, the sharded optimizer."""
