"""Examples of the guides: run with two tiny models, their quoted output is what is printed today."""

import forked
import pytest

from scripts import guide_outputs, quoted_run
from scripts.guide_outputs import ROOT

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
        ("a KL of 1.4e-05", "a KL of 1.3e-05", []),
        ("a KL of 9.9e-06", "a KL of 1.0e-05", []),
        ("a KL of 1.4e-05", "a KL of 1.4e-04", ["1.4e-05, now 1.4e-04"]),
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
        guide_outputs.run_shell("true\nfalse\ntrue\n", tmp_path)


def test_a_refusal_is_quoted_with_its_exit_code(tmp_path):
    refusal = "echo refused >&2\nexit 2\n"
    assert guide_outputs.run_shell(refusal, tmp_path, exit_code=2) == ["refused"]
    for commands, code in ((refusal, 0), (refusal, 1), ("true\n", 2)):
        with pytest.raises(ValueError, match="exit code"):
            guide_outputs.run_shell(commands, tmp_path, exit_code=code)


@pytest.mark.full  # starts the server that forks
def test_programs_of_an_example_are_processes_of_their_own(tmp_path):
    programs = guide_outputs.Programs(tmp_path, forked.stand_ins(tmp_path))
    code = "import os, sys, torch; print(os.getcwd(), sys.argv[1:]); sys.exit(3)"
    commands = f"cd /\ntype -P distill\npython -c '{code}' one two\n"
    assert guide_outputs.run_shell(commands, tmp_path, exit_code=3, programs=programs) == [
        str(tmp_path / "distill"),
        "/ ['one', 'two']",
    ]
    ended = "python -c 'import time; time.sleep(60)' & sleep 0.5; kill $!; wait $! || echo $?"
    assert guide_outputs.run_shell(ended, tmp_path, programs=programs) == ["143"]


RUN = """\
teacher     a.gguf, 134.5 M parameters
student     cut from the teacher, layers 0-11, 18-29, 113.3 M parameters, 113.3 M trained (100%)
step 1/6  loss 0.9476  kl 0.9476  agreement 53.1%  12 tokens/s  0:00:54 left
prompt: What is the capital of France?
  student before: The capital of the world is not a capital city.
held out        KL to teacher  agreement  perplexity
student before         1.0917      51.9%        7.74
student after          0.9019      55.6%        6.54
"""


@pytest.mark.parametrize(
    "was, now, fault",
    [
        ("", "", None),
        ("1.0917", "1.2917", "1.0917, now 1.2917"),
        ("not a capital", "a capital", "is not printed"),
        ("0.9019", "0.6019", None),  # after more steps
    ],
)
def test_a_longer_run_is_quoted_with_what_a_short_one_prints_too(was, now, fault):
    page = f"text\n\n```\n{RUN.replace('1/6', '1/32')}```\n"
    found = quoted_run.stale(page, RUN.replace(was, now))
    assert len(found) == (fault is not None) and all(fault in line for line in found)
    with pytest.raises(ValueError, match="expected a block that quotes a run"):
        quoted_run.stale("text", RUN)


@pytest.mark.parametrize("page", ["README.md", "docs/getting-started/quickstart.md"])
def test_pages_that_ci_holds_to_a_run_quote_one(page):
    assert len(quoted_run.stale((ROOT / page).read_text(), "")) >= 5


@pytest.mark.full
@pytest.mark.parametrize("page", guide_outputs.pages(), ids=lambda page: page.stem)
def test_examples_print_what_the_guides_quote(page, tmp_path):
    programs = guide_outputs.Programs(tmp_path, forked.stand_ins(tmp_path))
    guide_outputs.refreshed(page, exact=True, programs=programs)
