"""Keys to bytes, with range reads: memory, disk, another node, and tiers of them."""
