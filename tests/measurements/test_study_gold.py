"""The loss across tokenizers is GOLD's of TRL, but for the mass on matched tokens, where both compare the same."""

import pytest

from scripts.study import gold

pytest.importorskip("trl.experimental.gold", reason="needs pip install trl==1.16.0")

pytestmark = pytest.mark.full  # of scripts that measure, which no run of ours imports


@pytest.fixture(scope="module")
def found():
    return {name: gold.compare(case) for name, case in gold.make_cases(600, 12).items()}


def test_of_one_vocabulary_both_losses_are_equal(found):
    case = found["one vocabulary"]
    assert case.single == case.spans > 100
    assert case.ours == pytest.approx(case.gold, rel=1e-5) and case.gradient < 1e-4
    assert case.mass == pytest.approx(0, abs=1e-5)


def test_of_spans_of_one_shared_token_they_differ_by_the_mass_on_matched_tokens(found):
    case = found["shared words"]
    assert case.single == case.spans > 50
    assert case.ours == pytest.approx(case.gold + case.mass, rel=1e-5) and case.gradient < 1e-4
    assert abs(case.mass) > 0.01


def test_spans_of_several_tokens_are_compared_differently(found):
    case = found["any answer"]
    assert 0 < case.single < case.spans
    assert abs(case.ours - case.gold - case.mass) > 0.01


def test_the_student_s_answers_can_be_read_by_both(found):
    case = gold.make_cases(600, 12)["any answer"]
    speeds = gold.tokens_per_second(case)
    assert set(speeds) == {"ours", "GOLD"} and min(speeds.values()) > 0
