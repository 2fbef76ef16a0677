"""Which sequences run in a step, in which blocks, and how many tokens it has. Pure: no tensors."""
