"""What must always be true: one checker per invariant, fed with plain facts."""
