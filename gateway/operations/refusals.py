"""The error map of all operations: what ledger and accounts refuse, as errors with a code."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from gateway.accounts.accounts import AccountExists
from gateway.accounts.allotments import Overallotted
from gateway.accounts.organisations import AlreadyMember, OrganisationExists
from gateway.accounts.users import UserExists
from gateway.billing.statements.close import CannotClose
from gateway.catalog.price_overrides import InvalidPriceOverride
from gateway.errors import Conflict, InvalidRequest, NotFound
from gateway.ledger.prices import PriceConflict
from gateway.ledger.refunds import NotRefundable
from gateway.ledger.transfers import TransferConflict


@contextlib.contextmanager
def refusals(*, param: str | None = None) -> Iterator[None]:
    """Translate refusals into ``TollgateError``. Use it to decorate an operation.

    ``param`` is the field at fault if a value is not valid.
    """
    try:
        yield
    except AccountExists as error:
        raise Conflict("account_exists", sentence(error), param="name") from None
    except UserExists as error:
        raise Conflict("user_exists", sentence(error), param="email") from None
    except OrganisationExists as error:
        raise Conflict("organisation_exists", sentence(error), param="name") from None
    except AlreadyMember as error:
        raise Conflict("already_member", sentence(error), param="account") from None
    except Overallotted as error:
        raise Conflict("budget_overallotted", sentence(error), param="limit") from None
    except TransferConflict as error:
        raise Conflict("reference_conflict", sentence(error), param="reference") from None
    except PriceConflict as error:
        raise Conflict("price_conflict", sentence(error), param="from") from None
    except CannotClose as error:
        raise Conflict("cannot_close", sentence(error), param="month") from None
    except NotRefundable as error:
        raise InvalidRequest("not_refundable", sentence(error), param="amount") from None
    except InvalidPriceOverride as error:
        raise InvalidRequest("invalid_price", sentence(error), param="price") from None
    except LookupError as error:
        raise NotFound("not_found", sentence(error)) from None
    except ValueError as error:
        raise InvalidRequest("invalid_value", sentence(error), param=param) from None


def sentence(error: Exception) -> str:
    text = str(error.args[0] if error.args else error)
    # An id or a quoted value at the start stays as it is.
    start = text[:1].upper() if text.partition(" ")[0].isalpha() else text[:1]
    return f"{start}{text[1:]}."
