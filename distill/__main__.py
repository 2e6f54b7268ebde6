"""`python -m distill`, and the console script, are the command `distill`."""

import os
import signal

# until the command can say a word of its own; what is imported first takes some tenths of a second
signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))


def main() -> None:
    """Carry out the command line."""
    from distill import cli
    from distill.core.interrupts import Interrupts

    signal.signal(signal.SIGINT, Interrupts())
    cli.main()


if __name__ == "__main__":
    main()
