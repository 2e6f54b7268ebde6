"""Libraries' own bars, and warnings of settings that a recipe decides, kept out of what a person reads."""

from __future__ import annotations

import os
import sys
import warnings

# of torch's DataLoader: as many workers as data.workers says
WARNINGS = (r"This DataLoader will create \d+ worker processes", r"'pin_memory' argument is set as true")
BARS = ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS")
PARALLELISM = "TOKENIZERS_PARALLELISM"


def quieten() -> None:
    """Do so for this process and those that it starts; before the libraries are imported, which read these settings."""
    for message in WARNINGS:
        warnings.filterwarnings("ignore", message)
    if not sys.stderr.isatty():
        for name in BARS:
            os.environ.setdefault(name, "1")
    if hasattr(os, "register_at_fork") and PARALLELISM not in os.environ:
        # the tokenizers library warns in each fork that it gives up threads there, unless it is told so beforehand
        os.register_at_fork(
            before=lambda: os.environ.__setitem__(PARALLELISM, "false"),
            after_in_parent=lambda: os.environ.pop(PARALLELISM, None),
        )
