"""`python -m atoll` is the `atoll` command of this very Python."""

from atoll.app import main

if __name__ == "__main__":
    main()
