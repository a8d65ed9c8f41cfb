"""`python -m atoll.cli` is the `atoll` command too. It is above this room, so that it is started and not imported."""

import runpy

runpy.run_module("atoll", run_name="__main__", alter_sys=True)
