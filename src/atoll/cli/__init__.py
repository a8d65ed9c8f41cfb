"""The `atoll` command. This front door imports nothing: each command loads its rooms when it runs."""


def main() -> None:
    """Entry point of the `atoll` script and of `python -m atoll`."""
    from atoll.cli.app import run

    run()
