"""Style of reports and pictures: a palette for light and dark, and a style sheet for pages."""

from pathlib import Path

# the contrast of each colour with its background is at least 4.5, that of text with cards too, which a test holds
_PALETTE = """
    paper     #ffffff  #0f141b
    card      #f4f6f8  #19202a
    ink       #18212f  #e7ecf3
    quiet     #566273  #9eabbc
    rule      #dde2e9  #2b3441
    rest      #cdd4dd  #3c4858
    series-0  #2563eb  #7aa9ff
    series-1  #c2410c  #ff9566
    series-2  #047857  #4ad295
    series-3  #7c3aed  #b99bff
    series-4  #be185d  #ff86b4
    series-5  #0e7490  #4fc9dc
    series-6  #a16207  #facc15
    series-7  #4d7c0f  #a3e635
"""
_COLORS = [line.split() for line in _PALETTE.strip().splitlines()]
LIGHT = {name: light for name, light, _ in _COLORS}
DARK = {name: dark for name, _, dark in _COLORS}
SANS = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'


def document(title: str, body: str) -> str:
    """Return a self-contained HTML page; title and body are HTML."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head>\n<body><main>\n{body}\n</main></body></html>\n"
    )


def standalone(svg: str, theme: str = "") -> str:
    """Return an `<svg>` that was drawn in the light palette as a file.

    Args:
        theme: `light` or `dark`; empty for rules that follow the reader's preference.
    """
    if theme == "dark":
        for name, light in LIGHT.items():
            svg = svg.replace(light, DARK[name])
    rules = f"text {{ font-family: {SANS} !important; }}"
    if not theme:
        rules += f" @media (prefers-color-scheme: dark) {{ {_exchanged(DARK)} }}"
    return svg.replace("<defs>", f"<defs>\n  <style>{rules}</style>", 1) + "\n"


def _exchanged(colors: dict[str, str]) -> str:
    """Return rules that exchange the light colours of a drawing for others."""
    return " ".join(
        f'[style*="{kind}: {LIGHT[name]}"] {{ {kind}: {color} !important; }}'
        for name, color in colors.items()
        for kind in ("fill", "stroke")
    )


def _variables(palette: dict[str, str]) -> str:
    return " ".join(f"--{name}: {color};" for name, color in palette.items())


STYLE = (
    f":root {{ color-scheme: light dark; --sans: {SANS}; {_variables(LIGHT)} }}\n"
    f"@media (prefers-color-scheme: dark) {{ :root {{ {_variables(DARK)} }} }}\n"
    f"svg text {{ font-family: var(--sans) !important; }} {_exchanged({name: f'var(--{name})' for name in LIGHT})}\n"
    + Path(__file__).with_name("page.css").read_text(encoding="utf-8")
)
