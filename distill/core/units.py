"""Units."""

from __future__ import annotations

GIB = 2**30
