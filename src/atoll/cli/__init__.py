"""The `atoll` command. This front door imports nothing: each command loads its rooms when it runs."""


def main() -> None:
    """Entry point of the `atoll` script and of `python -m atoll`."""
    import atexit
    import gc

    from atoll.cli.app import run

    # A Python that has loaded PyTorch takes a second to end, nearly all of it in search of cycles among what nobody
    # will use again.
    atexit.register(gc.freeze)
    run()
