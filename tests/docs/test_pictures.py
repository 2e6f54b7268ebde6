"""The README's pictures are what the rows in the repository give, and hold no figure of their own."""

import re
from xml.etree import ElementTree

import matplotlib
import pytest

from distill.reports.style import LIGHT
from scripts import pictures
from scripts.readme import GPU, ROOT, newest_rows

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.full
def test_regenerating_gives_the_committed_pictures(tmp_path):
    pictures.draw(tmp_path)
    names = ["losses", "tutorial"]
    made = sorted(path.name for path in tmp_path.iterdir())
    assert made == sorted(f"{name}-{theme}.svg" for name in names for theme in pictures.THEMES)
    pinned = f"matplotlib=={matplotlib.__version__}" in (ROOT / "constraints.txt").read_text().split()
    for name in made:
        found, expected = ((folder / name).read_text() for folder in (tmp_path, pictures.ASSETS))
        if not pinned:  # another version may put a line elsewhere; it writes the same words
            found, expected = (re.findall(">([^<]*)</text>", text) for text in (found, expected))
        assert found == expected, f"{name}: run python -m scripts.pictures"


def bars(svg):
    """Widths of the bars in order, column by column, and all text."""
    root = ElementTree.fromstring(svg)
    widths = []
    for path in root.iter(f"{SVG}path"):
        if any(f"fill: {LIGHT[name]}" in path.get("style", "") for name in ("series-0", "rest")):
            across = [float(x) for x in re.findall(r"[ML] ([\d.]+) ", path.get("d"))]
            widths.append(max(across) - min(across))
    return widths, ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]


def test_bars_are_as_long_as_their_figures():
    rows = [row for row in newest_rows(gpu=GPU) if (row["case"], row["shape"]) == (pictures.CASE, pictures.SHAPE)]
    widths, texts = bars(pictures.losses(rows, "light"))
    chosen = [next(row for row in rows if row["candidate"] == name) for name in pictures.CANDIDATES]
    count = len(chosen)
    assert len(widths) == 3 * count
    for column, figure in enumerate((lambda row: row["ms"], lambda row: row["peak_mib"])):
        part, values = widths[column * count : (column + 1) * count], [figure(row) for row in chosen]
        longest = max(values)
        assert [width / max(part) for width in part] == pytest.approx([v / longest for v in values], abs=1e-4)
    assert f"{chosen[0]['ms']:.1f}" in texts and any(chosen[0]["commit"] in text for text in texts)
    rows[1] = rows[1] | {"ms": 2 * rows[1]["ms"]}
    assert bars(pictures.losses(rows, "light"))[0] != widths
    with pytest.raises(KeyError, match="TRL"):
        pictures.losses([row for row in rows if "TRL" not in row["candidate"]], "light")


def test_the_pictures_load_nothing_and_differ_by_their_colours_alone():
    light, dark = (pictures.losses(newest_rows(gpu=GPU), theme) for theme in pictures.THEMES)
    assert light != dark and re.sub("#[0-9a-f]{6}", "", light) == re.sub("#[0-9a-f]{6}", "", dark)
    assert "url(" not in light.replace("url(#", "") and "<script" not in light
    assert all(target.startswith("#") for target in re.findall('href="([^"]*)', light))
