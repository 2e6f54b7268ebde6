"""`python -m distill` is the command `distill`."""

from distill.cli import main

if __name__ == "__main__":
    main()
