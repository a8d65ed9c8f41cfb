"""`python -m atoll.cli` is the `atoll` command too."""

from atoll.cli import main

if __name__ == "__main__":
    main()
