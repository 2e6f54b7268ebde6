"""The README's pictures are what the rows in the repository give, and hold no figure of their own."""

import re
from xml.etree import ElementTree

import pytest

from scripts import pictures
from scripts.readme import GPU, newest_rows

SVG = "{http://www.w3.org/2000/svg}"


def test_regenerating_gives_the_committed_pictures(tmp_path):
    pictures.draw(tmp_path)
    names = ["losses", "tutorial"]
    made = sorted(path.name for path in tmp_path.iterdir())
    assert made == sorted(f"{name}-{theme}.svg" for name in names for theme in pictures.THEMES)
    for name in made:
        expected = (pictures.ASSETS / name).read_text()
        assert (tmp_path / name).read_text() == expected, f"{name}: run python -m scripts.pictures"


def bars(svg):
    """Widths of the bars in order, column by column, and all text."""
    root = ElementTree.fromstring(svg)
    widths = [float(bar.get("width")) for bar in root.iter(f"{SVG}rect") if bar.get("class") in ("ours", "rest")]
    return widths, ["".join(text.itertext()) for text in root.iter(f"{SVG}text")], root


def test_bars_are_as_long_as_their_figures():
    rows = [row for row in newest_rows(gpu=GPU) if (row["case"], row["shape"]) == (pictures.CASE, pictures.SHAPE)]
    widths, texts, root = bars(pictures.losses(rows, "light"))
    chosen = [next(row for row in rows if row["candidate"] == name) for name in pictures.CANDIDATES]
    count = len(chosen)
    assert len(widths) == 3 * count
    for column, figure in enumerate((lambda row: row["ms"], lambda row: row["peak_mib"])):
        part, values = widths[column * count : (column + 1) * count], [figure(row) for row in chosen]
        longest = max(values)
        assert [width / max(part) for width in part] == pytest.approx(
            [v / longest for v in values], abs=2e-3
        )  # widths are written to a tenth
    assert f"{chosen[0]['ms']:.1f}" in texts and any(chosen[0]["commit"] in text for text in texts)
    edge = float(root.get("width"))
    for text in root.iter(f"{SVG}text"):
        assert float(text.get("x")) + 7.2 * len("".join(text.itertext())) < edge, "".join(text.itertext())
    rows[1] = rows[1] | {"ms": 2 * rows[1]["ms"]}
    assert bars(pictures.losses(rows, "light"))[0] != widths
    with pytest.raises(KeyError, match="TRL"):
        pictures.losses([row for row in rows if "TRL" not in row["candidate"]], "light")


def test_the_pictures_load_nothing_and_differ_by_their_colours_alone():
    light, dark = (pictures.losses(newest_rows(gpu=GPU), theme) for theme in pictures.THEMES)
    assert light != dark and re.sub("#[0-9a-f]{6}", "", light) == re.sub("#[0-9a-f]{6}", "", dark)
    assert "url(" not in light and "href" not in light and "<script" not in light
