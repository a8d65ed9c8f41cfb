"""The contract (`atoll.proto`) and the Python that `scripts/proto` makes from it."""
