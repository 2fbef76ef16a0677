"""Forms that do one act, once: a reload that sends a form again finds that it was done before.

The form carries the call id under which its act is recorded; if the audit log has that id, the act
was done.
"""

from __future__ import annotations

from dataclasses import replace

from sqlalchemy import Connection

from gateway.audit_log import CALL_PREFIX, AuditFilter, Author, list_events
from gateway.console.queries import FormValues
from gateway.console.visitors import Visitor
from gateway.ids import is_id, new_id


def new_once() -> str:
    """Return the value of a form's hidden field ``once``."""
    return new_id(CALL_PREFIX)


def author_once(visitor: Visitor, form: FormValues) -> Author:
    """Return the author of the one act that a form does."""
    once = form.text("once")
    author = visitor.author()
    return author if once is None or not is_id(CALL_PREFIX, once) else replace(author, call_id=once)


def is_sent_again(connection: Connection, author: Author) -> bool:
    """Whether a form has done its act before."""
    return bool(list_events(connection, AuditFilter(call_id=author.call_id), limit=1))
