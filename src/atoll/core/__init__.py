"""The protocol and its policies: pure data and pure functions. No IO, clock, thread, randomness, log or array."""
