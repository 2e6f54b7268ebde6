"""Examples of the guides: run with two tiny models, their quoted output is what is printed today."""

import pytest

from scripts import guide_outputs

QUOTED = ["loss  1.5  4 tokens", "...", "step 12/12  loss 0.1", "data  ..."]
PRINTED = ["reading", "loss  2.25  1,024 tokens", "step 1/12  loss 0.9", "step 12/12  loss inf", "data  from here"]


def test_quoted_lines_become_those_that_are_printed():
    today = ["loss  2.25  1,024 tokens", "...", "step 12/12  loss inf", "data  ..."]
    assert guide_outputs.printed(QUOTED, PRINTED, exact=True) == today
    reworded = [PRINTED[1].replace("tokens", "tokens in all"), *PRINTED[2:]]
    assert guide_outputs.printed(QUOTED, reworded, exact=False)[0] == reworded[0]


@pytest.mark.parametrize(
    "lines",
    [
        [PRINTED[1].replace("tokens", "tokens in all"), *PRINTED[2:]],  # other words
        PRINTED[2:],  # one is not printed
        [*PRINTED[2:], PRINTED[1]],  # another order
    ],
)
def test_a_quoted_line_that_is_not_printed_is_noticed(lines):
    with pytest.raises(ValueError, match="expected a line like"):
        guide_outputs.printed(QUOTED, lines, exact=True)


@pytest.mark.parametrize(
    "quoted, now, differences",
    [
        ("step 12/12  loss 0.4789  20,668 tokens/s  0:00:01", "step 12/12  loss 0.4801  9 tokens/s  0:10:00", []),
        ("step 12/12  loss 0.4789", "step 11/12  loss 0.4789", ["12, now 11"]),
        ("step 12/12  loss 0.4789", "step 12/12  loss 0.5789", ["0.4789, now 0.5789"]),
        ("agreement 2.0%", "agreement 2.2%", []),
        ("1,024 tokens", "1,025 tokens", ["1,024, now 1,025"]),
        ("agreement 2.0%", "agreement 2.4%", ["2.0, now 2.4"]),
        ("K 64  inf", "K 64  1.0", ["inf, now 1.0"]),
        ("over 1,024 tokens ...", "over 1,024 tokens in 5 rows", []),
    ],
)
def test_numbers_are_those_of_today_but_for_rounding_and_time(quoted, now, differences):
    assert guide_outputs.other_numbers(quoted, now) == differences
    if differences:
        with pytest.raises(ValueError, match="expected the numbers of today"):
            guide_outputs.printed([quoted], [now], exact=True, numbers=True)


def test_a_command_that_fails_is_noticed(tmp_path):
    with pytest.raises(ValueError, match="exit code 1"):
        guide_outputs.run("true\nfalse\ntrue\n", tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("page", guide_outputs.pages(), ids=lambda page: page.stem)
def test_examples_print_what_the_guides_quote(page):
    guide_outputs.refreshed(page, exact=True)
