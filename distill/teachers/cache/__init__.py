"""A teacher on disk: what it said of each document, written once, found again by content."""
