"""What gpuwarden did on this node: an append-only file, each entry chained to the one before."""
