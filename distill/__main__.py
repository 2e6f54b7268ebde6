"""`python -m distill`, and the console script, are the command `distill`."""

import os
import signal

# until the command can say a word of its own; what is imported first takes some tenths of a second
signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))


def main() -> None:
    """Carry out the command line."""
    from distill import cli

    signal.signal(signal.SIGINT, signal.default_int_handler)
    cli.main()


if __name__ == "__main__":
    main()
