"""`atoll replay` without the terminal: the merges of a recorded run made again, and the tapes of two runs compared."""
