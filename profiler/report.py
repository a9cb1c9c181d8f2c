"""One self-contained HTML file: headings, sentences, tables made by pandas and figures made by matplotlib, as SVG.

It knows nothing of what it shows. There is no script and no link, so the file can be mailed and printed; all text is
escaped; the same content gives the same bytes. Pictures of many points belong into the SVG as pixels (``imshow`` of a
small array), so that the file of a large model stays small.
"""

import html
import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, MUTED, ACCENT, SECOND = "#1f2430", "#8a93a3", "#1f5fa8", "#c8641b"  # text, secondary lines, two series
HEAT_COLOURS = "cividis"  # even in lightness, so that it survives a black-and-white printer
_RC: dict[Any, Any] = {
    "svg.fonttype": "none",  # letters stay letters, in the page's own font
    "svg.hashsalt": "powerinfer-toolkit",
    "font.family": "sans-serif",
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
}
_CSS = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif; color: #1f2430; background: #fff;
  max-width: 62rem; margin: 2.5rem auto; padding: 0 1.5rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem; }
h2 { font-size: 1.15rem; margin: 2.4rem 0 .4rem; padding-bottom: .25rem; border-bottom: 1px solid #d9dde4; }
p { margin: .5rem 0; max-width: 48rem; }
.subtitle, figcaption { color: #5a6372; }
.key { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1.2rem 0; padding: 0; list-style: none; }
.key li { border: 1px solid #d9dde4; border-radius: 6px; padding: .5rem .9rem; min-width: 7rem; }
.key strong { display: block; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
.key span { color: #5a6372; font-size: .85rem; }
figure { margin: 1rem 0; break-inside: avoid; }
figure svg { width: 100%; height: auto; }
figcaption { font-size: .9rem; max-width: 48rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .88rem; margin: .8rem 0; }
th, td { padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #eceff3; }
th { color: #5a6372; font-weight: 600; border-bottom: 1px solid #b9c0cb; vertical-align: bottom; }
@media print { body { margin: 0; max-width: none; font-size: 11px; } h2 { break-after: avoid; } tr { break-inside: avoid; }
  thead { display: table-header-group; } .scroll { overflow: visible; } }
"""


class Report:
    """Collects the parts of a page from top to bottom; :meth:`html` is the file."""

    def __init__(self, title: str, subtitle: str = "") -> None:
        self._title, self._figures = title, 0
        self._parts = [f"<h1>{html.escape(title)}</h1>"]
        if subtitle:
            self._parts.append(f'<p class="subtitle">{html.escape(subtitle)}</p>')

    def heading(self, text: str) -> None:
        self._parts.append(f"<h2>{html.escape(text)}</h2>")

    def text(self, text: str) -> None:
        """One paragraph."""
        self._parts.append(f"<p>{html.escape(text)}</p>")

    def key_figures(self, values: dict[str, str]) -> None:
        """The few numbers a reader looks for first, as a row of boxes: what it is → the number with its unit."""
        items = "".join(
            f"<li><strong>{html.escape(value)}</strong><span>{html.escape(name)}</span></li>"
            for name, value in values.items()
        )
        self._parts.append(f'<ul class="key">{items}</ul>')

    def table(self, columns: dict[str, Sequence[object]]) -> None:
        """Columns of equal length under their titles; cells appear as ``str`` writes them."""
        import pandas

        cells = {name: [str(cell) for cell in column] for name, column in columns.items()}
        table = pandas.DataFrame(cells).to_html(index=False, border=0, escape=True)
        self._parts.append(f'<div class="scroll">{table}</div>')

    def figure(self, figure: "Figure", caption: str) -> None:
        """A figure from :func:`new_figure`, as SVG inside the page; *caption* is also what a screen reader says."""
        self._figures += 1
        svg = figure_svg(figure, f"f{self._figures}-")
        self._parts.append(
            f'<figure role="img" aria-label="{html.escape(caption)}">{svg}'
            f"<figcaption>{html.escape(caption)}</figcaption></figure>"
        )

    def html(self) -> bytes:
        """The whole file, UTF-8."""
        head = (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{html.escape(self._title)}</title><style>{_CSS}</style></head><body>\n"
        )
        return (head + "\n".join(self._parts) + "\n</body></html>\n").encode()


@contextmanager
def figure_style() -> Iterator[None]:
    """The look that all figures of reports share; both making and saving a figure happen inside it."""
    import matplotlib

    with matplotlib.rc_context(_RC):
        yield


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure of *width* × *height* inches (the page is about 9.5 wide); add axes with ``subplots``.

    Matplotlib reads text between dollar signs as mathematics, so names of models and corpora belong into captions.

    Make the axes inside :func:`figure_style`.
    """
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def figure_svg(figure: "Figure", id_prefix: str = "") -> str:
    """The figure as an ``<svg>`` element to put into HTML; *id_prefix* keeps ids apart where a page has several."""
    buffer = io.StringIO()
    with figure_style():
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    return re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{id_prefix}", svg)
