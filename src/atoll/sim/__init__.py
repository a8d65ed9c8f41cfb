"""The virtual world: the same machines as in production, a simulated clock, network and disk, and one seed."""
