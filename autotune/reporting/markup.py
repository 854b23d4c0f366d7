"""Small builders of HTML. Every text from outside is escaped here, and only here."""

import html
from collections.abc import Sequence


class Html(str):
    """Markup that is safe to put into a page; a plain ``str`` is escaped."""

    __slots__ = ()


def text(value: object) -> Html:
    """A value as escaped text; markup stays markup."""
    return value if isinstance(value, Html) else Html(html.escape(str(value)))


def tag(name: str, *children: object, **attributes: object) -> Html:
    """An element; attribute names lose a trailing underscore and ``_`` becomes ``-``."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    inside = "".join(text(child) for child in children)
    return Html(f"<{name}{given}>{inside}</{name}>")


def join(parts: Sequence[object], between: str = "") -> Html:
    """Parts one after the other."""
    return Html(html.escape(between).join(text(part) for part in parts))


def table(
    heads: Sequence[str],
    rows: Sequence[Sequence[object]],
    numeric: Sequence[int] = (),
    *,
    dense: bool = False,
) -> Html:
    """A table that becomes one card a row on a narrow screen (heads repeat beside the cells).

    ``dense``: there it stays a table of its first three columns instead.
    """
    head = tag("tr", *(_cell("th", h, i in numeric, None) for i, h in enumerate(heads)))
    body = [
        tag("tr", *(_cell("td", c, i in numeric, heads[i]) for i, c in enumerate(row)))
        for row in rows
    ]
    inside = tag(
        "table", tag("thead", head), tag("tbody", *body), class_="dense" if dense else "cards"
    )
    return tag("div", inside, class_="scroll")


def _cell(name: str, value: object, numeric: bool, head: str | None) -> Html:
    return tag(name, value, class_="n" if numeric else None, data_head=head)


def section(title: str, *children: object, anchor: str) -> Html:
    """A titled part of the page."""
    return tag("section", tag("h2", title), *children, id=anchor)
