"""A report is one file that opens anywhere: nothing loaded from elsewhere, nothing executed, all text escaped."""

import re
from html.parser import HTMLParser

import numpy as np

from pi_toolkit.profiler.report import Report, figure_style, new_figure

HOSTILE = '</p><script>alert("1")</script>&amp;'


def make_report(cells: int = 12) -> bytes:
    report = Report(f"Title {HOSTILE}", HOSTILE)
    report.key_figures({HOSTILE: "12 %"})
    report.heading(HOSTILE)
    report.text(HOSTILE)
    report.table({"layer": range(2), HOSTILE: [HOSTILE, 0.5]})
    for number in range(2):
        with figure_style():
            figure = new_figure(6, 2)
            lines, picture = figure.subplots(1, 2)
            lines.plot([1, 2, 3 + number], label="<b>")
            lines.legend()
            picture.imshow(np.arange(cells * 8.0).reshape(8, cells), aspect="auto", interpolation="nearest")
        report.figure(figure, HOSTILE)
    return report.html()


class Page(HTMLParser):
    """Which elements, ids and references a page has."""

    def __init__(self, content: bytes) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.words = ""
        self.feed(content.decode())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "xlink:href", "src", "action"):
                self.references.append(value or "")
            if (match := re.fullmatch(r"url\(#(.*)\)", value or "")) is not None:
                self.references.append(f"#{match[1]}")
            assert not name.startswith("on"), name

    def handle_data(self, data: str) -> None:
        self.words += data


def test_text_is_text() -> None:
    """Prevents a model's or corpus' name from becoming markup or a script."""
    page = Page(make_report())
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    assert page.words.count(HOSTILE) == 10  # title twice, subtitle, key, heading, text, column, cell, two captions
    assert page.tags.count("svg") == 2 and page.tags.count("table") == 1


def test_nothing_outside_is_needed() -> None:
    """Prevents a report that is empty on the train, and figures that borrow each other's clipping."""
    page = Page(make_report())
    assert len(page.ids) == len(set(page.ids)) > 20
    for reference in page.references:
        assert reference.startswith("data:image/png;base64") or reference.removeprefix("#") in page.ids, reference
    assert "@import" not in (style := make_report().decode()) and "url(http" not in style


def test_same_content_same_bytes() -> None:
    """Prevents dates and random ids, which would make equal profiles look different."""
    assert make_report() == make_report()


def test_pictures_have_the_size_of_the_page_not_of_the_model() -> None:
    """Prevents a megabyte per thousand neurons."""
    assert len(make_report(cells=11008)) < 200_000
