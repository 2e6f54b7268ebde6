"""Entry point of `python -m distill` and of the console script `distill`."""

import os
import signal

# Ctrl-C during the first imports (some tenths of a second) exits at once; main() installs the real handler
signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))


def main() -> None:
    from distill.core.startup import paused_collection

    with paused_collection():
        from distill import cli
        from distill.core.interrupts import DeferredInterrupt

    signal.signal(signal.SIGINT, DeferredInterrupt())
    cli.main()


if __name__ == "__main__":
    main()
