"""Renders statements as HTML for printing and as PDF, with the same content.

The PDF embeds Roboto, which has Latin, Greek and Cyrillic letters. Pure.
"""

from __future__ import annotations

import datetime as dates
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import font_roboto
from fpdf import FPDF, FontFace
from fpdf.enums import TableBordersLayout, TableCellFillMode, WrapMode
from jinja2 import Environment, PackageLoader

from gateway.billing.statements.organisation import OrganisationStatement
from gateway.billing.statements.statement import Statement
from gateway.pricing import format_usd

NOTE: Final = (
    "Amounts in USD. Times are UTC. The total is rounded down to cents once; what is left over is "
    "carried to the next invoice."
)
_TEMPLATES: Final = Environment(
    loader=PackageLoader("gateway.billing"), autoescape=True, trim_blocks=True
)


@dataclass(frozen=True, slots=True)
class Issuer:
    """Issuer of statements; semicolons separate the lines of the address."""

    name: str
    address: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """``numbers`` are the right-aligned columns; the last line of ``foot`` is the total."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: frozenset[int]
    foot: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True, slots=True)
class PrintedPage:
    title: str
    draft: bool
    owner: str
    facts: Sequence[tuple[str, str]]
    tables: Sequence[Table]
    issuer_name: str
    issuer_address: str
    note: str


def lay_out(made: Statement, issuer: Issuer) -> PrintedPage:
    """Convert a statement to texts and tables."""
    invoice = made.invoice
    month = _month(made.month)
    facts = [("Account", _numbered(made.account, made.account_id)), ("Month", month)]
    if invoice is not None:
        facts.append(("Issued", invoice.issued_at.date().isoformat()))
    facts.append(("Balance at its start", f"${format_usd(made.opening_nanos)}"))
    facts.append(("Balance at its end", f"${format_usd(made.closing_nanos)}"))
    usage = _usage("Usage", made)
    moved = Table(
        "Payments and credit",
        ("Date", "Kind", "Reason", "Amount"),
        [
            (each.booked_at.date().isoformat(), each.kind, each.reason, _usd(each.amount_nanos))
            for each in made.movements
        ],
        frozenset({3}),
    )
    tables = [usage, moved]
    if made.credit_notes:
        tables.append(
            Table(
                "Credit notes",
                ("Number", "To", "Reason", "Amount"),
                [
                    (note.number, note.corrects or "", note.reason, _cents(note.total_cents))
                    for note in made.credit_notes
                ],
                frozenset({3}),
            )
        )
    return _page(
        f"Invoice {invoice.number}" if invoice else f"Statement of {month}",
        invoice is None,
        made.account,
        facts,
        tables,
        issuer,
    )


def lay_out_organisation(made: OrganisationStatement, issuer: Issuer) -> PrintedPage:
    """Convert the statement of an organisation to texts and tables: its accounts, then the usage of
    each."""
    owner, month = made.organisation, _month(made.month)
    facts = [
        ("Organisation", _numbered(owner.name, owner.id)),
        ("Month", month),
        ("Accounts", str(len(made.accounts))),
        ("Balances at its start", _usd(made.opening_nanos)),
        ("Balances at its end", _usd(made.closing_nanos)),
    ]
    accounts = Table(
        "Accounts",
        ("Account", "Invoice", "Sum", "Total"),
        [
            (
                _numbered(each.account, each.account_id),
                each.invoice.number if each.invoice else "draft",
                _usd(each.sum_nanos),
                _cents(each.total_cents),
            )
            for each in made.accounts
        ],
        frozenset({2, 3}),
        _foot(made),
    )
    usage = [
        _usage(f"Usage of {_numbered(each.account, each.account_id)}", each)
        for each in made.accounts
    ]
    title = f"Statement of {month}"
    return _page(title, made.draft, owner.name, facts, [accounts, *usage], issuer)


def html(page: PrintedPage) -> str:
    return _TEMPLATES.get_template("statement.html").render(page=page)


def pdf(page: PrintedPage, *, at: dates.datetime) -> bytes:
    """Render a PDF. ``at`` is its creation date, so that the same page gives the same bytes."""
    paper = FPDF(format="A4")
    paper.set_creation_date(at)
    paper.set_title(f"{page.title} · {page.owner}")
    paper.set_author(page.issuer_name)
    paper.add_font("Roboto", "", font_roboto.Roboto)
    paper.add_font("Roboto", "B", font_roboto.RobotoBold)
    paper.set_margins(16, 18)
    paper.set_auto_page_break(True, margin=18)
    paper.add_page()
    _head(paper, page)
    for table in page.tables:
        _table(paper, table)
    paper.ln(8)
    paper.set_font("Roboto", "", 8)
    paper.set_text_color(87, 96, 106)
    paper.multi_cell(0, 4, page.note)
    return bytes(paper.output())


def _head(paper: FPDF, page: PrintedPage) -> None:
    top = paper.get_y()
    paper.set_font("Roboto", "", 9)
    paper.set_text_color(87, 96, 106)
    paper.set_xy(120, top)
    paper.multi_cell(74, 4.5, f"{page.issuer_name}\n{page.issuer_address}", align="R")
    below = paper.get_y()
    paper.set_xy(16, top)
    paper.set_text_color(27, 31, 36)
    paper.set_font("Roboto", "B", 17)
    paper.multi_cell(100, 8, page.title + (" (draft)" if page.draft else ""), align="L")
    paper.ln(2)
    for name, value in page.facts:
        paper.set_font("Roboto", "", 9)
        paper.set_text_color(87, 96, 106)
        paper.set_x(16)
        paper.cell(38, 4.8, name)
        paper.set_text_color(27, 31, 36)
        paper.multi_cell(64, 4.8, value, align="L", wrapmode=WrapMode.CHAR)
    paper.set_y(max(below, paper.get_y()) + 3)
    paper.set_draw_color(27, 31, 36)
    paper.line(16, paper.get_y(), 194, paper.get_y())


def _table(paper: FPDF, table: Table) -> None:
    paper.ln(6)
    paper.set_text_color(27, 31, 36)
    paper.set_font("Roboto", "B", 11)
    paper.cell(0, 7, table.title, new_x="LMARGIN", new_y="NEXT")
    paper.set_font("Roboto", "", 9)
    paper.set_draw_color(200, 205, 210)
    align = tuple("RIGHT" if place in table.numbers else "LEFT" for place in range(len(table.head)))
    widths = (46, 62, 34, 36) if 2 in table.numbers else (24, 24, 94, 36)
    with paper.table(
        borders_layout=TableBordersLayout.HORIZONTAL_LINES,
        cell_fill_mode=TableCellFillMode.NONE,
        col_widths=widths,
        text_align=align,
        headings_style=FontFace(emphasis="BOLD", color=(87, 96, 106)),
        line_height=5,
        padding=0.6,
        wrapmode=WrapMode.CHAR,
    ) as lines:
        lines.row(table.head)
        for row in table.rows or [("Nothing.", *[""] * (len(table.head) - 1))]:
            lines.row(row)
        for place, (name, value) in enumerate(table.foot, start=1):
            bold = FontFace(emphasis="BOLD") if place == len(table.foot) else None
            line = lines.row()
            line.cell(name, colspan=len(table.head) - 1, style=bold, align="LEFT")
            line.cell(value, style=bold)


def _page(
    title: str,
    draft: bool,
    owner: str,
    facts: Sequence[tuple[str, str]],
    tables: Sequence[Table],
    issuer: Issuer,
) -> PrintedPage:
    return PrintedPage(
        title=title,
        draft=draft,
        owner=owner,
        facts=facts,
        tables=tables,
        issuer_name=issuer.name,
        issuer_address="\n".join(part.strip() for part in issuer.address.split(";")),
        note="\n".join(filter(None, (issuer.note, NOTE))),
    )


def _usage(title: str, made: Statement) -> Table:
    return Table(
        title,
        ("Model", "Unit", "Quantity", "Amount"),
        [
            (
                line.model or line.kind,
                line.unit or line.description,
                line.quantity or "",
                _usd(line.amount_nanos),
            )
            for line in made.lines
        ],
        frozenset({2, 3}),
        _foot(made),
    )


def _foot(made: Statement | OrganisationStatement) -> tuple[tuple[str, str], ...]:
    return (
        ("Sum", _usd(made.sum_nanos)),
        ("Carried from the last invoice", _usd(made.carried_in_nanos)),
        ("Carried to the next invoice", _usd(-made.carried_out_nanos)),
        ("Total", _cents(made.total_cents)),
    )


def _month(month: str) -> str:
    return dates.date.fromisoformat(f"{month}-01").strftime("%B %Y")


def _numbered(name: str, number: int) -> str:
    return f"{name} (no. {number})"


def _cents(cents: int) -> str:
    dollars, rest = divmod(abs(cents), 100)
    return f"{'-' if cents < 0 else ''}${dollars:,}.{rest:02d}"


def _usd(nanos: int) -> str:
    """Format an amount with all digits, because amounts can be below a cent."""
    sign = "-" if nanos < 0 else ""
    return f"{sign}${format_usd(abs(nanos))}"
