"""Style of reports and pictures: a palette for light and dark, chart rules, a style sheet for pages."""

from pathlib import Path

# the contrast of each colour with its background is at least 4.5, that of text with cards too: tests/test_report.py
LIGHT = {
    "paper": "#ffffff", "card": "#f4f6f8", "ink": "#18212f", "quiet": "#566273", "rule": "#dde2e9", "rest": "#cdd4dd",
    "series-0": "#2563eb", "series-1": "#c2410c", "series-2": "#047857", "series-3": "#7c3aed", "series-4": "#be185d",
    "series-5": "#0e7490",
}  # fmt: skip
DARK = {
    "paper": "#0f141b", "card": "#19202a", "ink": "#e7ecf3", "quiet": "#9eabbc", "rule": "#2b3441", "rest": "#3c4858",
    "series-0": "#7aa9ff", "series-1": "#ff9566", "series-2": "#4ad295", "series-3": "#b99bff", "series-4": "#ff86b4",
    "series-5": "#4fc9dc",
}  # fmt: skip

SANS = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'
CHART = Path(__file__).with_name("chart.css").read_text(encoding="utf-8").replace("SANS", SANS)


def document(title: str, body: str) -> str:
    """Return a self-contained HTML page; title and body are HTML."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head>\n<body><main>\n{body}\n</main></body></html>\n"
    )


def _variables(palette: dict[str, str]) -> str:
    return " ".join(f"--{name}: {color};" for name, color in palette.items())


STYLE = (
    f":root {{ color-scheme: light dark; --font: 12px; --sans: {SANS}; {_variables(LIGHT)} }}\n"
    f"@media (prefers-color-scheme: dark) {{ :root {{ {_variables(DARK)} }} }}\n{CHART}"
    + Path(__file__).with_name("page.css").read_text(encoding="utf-8")
)
