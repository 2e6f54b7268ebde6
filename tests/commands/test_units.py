"""Numbers with their nouns in messages."""

import pytest

from distill.core.units import plural


@pytest.mark.parametrize(
    "number, noun, text",
    [
        (1, "micro-batch", "1 micro-batch"),
        (2, "micro-batch", "2 micro-batches"),
        (0, "row", "0 rows"),
        (1000, "process", "1,000 processes"),
    ],
)
def test_counts_have_singular_and_plural_nouns(number, noun, text):
    assert plural(number, noun) == text
