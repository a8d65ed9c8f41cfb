"""`python -m atoll` is the `atoll` command of this very Python."""

from atoll.cli import main

if __name__ == "__main__":
    main()
