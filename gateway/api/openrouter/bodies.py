"""OpenRouter's extensions of a chat completion: routing, fallbacks, price caps.

There is one provider here, ``tollgate``. Options that would change the answer or its price are
applied or refused by name, never ignored; options without such an effect are accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from gateway.api.http.fields import ModelName, Refused
from gateway.catalog.listing import PROVIDER, openrouter_pricing
from gateway.catalog.schema import CatalogEntry
from gateway.checks.strict import StrictModel
from gateway.errors import InvalidRequest

PER_MILLION: Final = ("prompt", "completion")
"""Caps in USD per million tokens; the others are per unit."""


class MaxPrice(StrictModel):
    """A client's maximum prices in USD: per million tokens, per request, per image."""

    prompt: Annotated[Decimal, Field(ge=0)] | None = None
    completion: Annotated[Decimal, Field(ge=0)] | None = None
    request: Annotated[Decimal, Field(ge=0)] | None = None
    image: Annotated[Decimal, Field(ge=0)] | None = None


class Provider(BaseModel):
    """Preferences among providers; without effect unless they exclude the only one."""

    model_config = ConfigDict(extra="ignore")

    only: list[str] | None = None
    order: list[str] | None = None
    ignore: list[str] | None = None
    allow_fallbacks: bool | None = None
    max_price: MaxPrice | None = None


class OpenRouterOptions(BaseModel):
    """Fields that OpenRouter adds to OpenAI's body."""

    models: Annotated[list[ModelName], Field(min_length=1, max_length=20)] | None = None
    provider: Provider | None = None
    usage: dict[str, Any] | None = None
    """Requests usage and cost, which every answer includes anyway."""
    route: Literal["fallback"] | None = None
    transforms: Refused[list[Any]] = None
    plugins: Refused[list[Any]] = None
    reasoning: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    top_a: Refused[Annotated[float, Field(ge=0, le=1)]] = None
    session_id: str | None = None
    trace: Any | None = None

    def refuse_unsupported(self) -> None:
        """Raise ``InvalidRequest`` for options that are not supported and would have an effect."""
        if self.reasoning is not None and asks_for_reasoning(self.reasoning):
            raise _unsupported("reasoning", "is not supported by the models served here")
        provider = self.provider
        if provider is None:
            return
        for name in ("only", "order"):
            named = getattr(provider, name)
            binding = name == "only" or provider.allow_fallbacks is False
            if named and binding and PROVIDER not in named:
                raise _unsupported(
                    f"provider.{name}",
                    f"names {', '.join(named)}; the only provider here is {PROVIDER}",
                )
        if PROVIDER in (provider.ignore or ()):
            raise _unsupported("provider.ignore", f"excludes {PROVIDER}, the only provider here")

    def check_max_price(self, entry: CatalogEntry) -> None:
        """Raise ``InvalidRequest`` if a model costs more than the client's maximum price."""
        caps = self.provider.max_price if self.provider else None
        if caps is None:
            return
        prices = openrouter_pricing(entry)
        for name, most in caps.model_dump(exclude_none=True).items():
            price = Decimal(prices.get(name, "0")) * (10**6 if name in PER_MILLION else 1)
            if price > most:
                raise InvalidRequest(
                    "price_above_maximum",
                    f"{entry.name} costs ${price.normalize():f} per "
                    f"{'million ' + name + ' tokens' if name in PER_MILLION else name}, more than "
                    f"provider.max_price.{name} of ${most:f}.",
                    param=f"provider.max_price.{name}",
                )


def first_served(named: list[str], is_served: Callable[[str], bool | None]) -> str:
    """Return the first model of a list of fallbacks that is served now.

    ``is_served`` returns None for an unknown model. If none is served, return the first that
    exists, or else the first.
    """
    known = [(name, served) for name in named if (served := is_served(name)) is not None]
    return next((name for name, served in known if served), known[0][0] if known else named[0])


def asks_for_reasoning(reasoning: dict[str, Any] | None) -> bool:
    """Whether reasoning is requested, not merely disabled or left at its default."""
    given = reasoning or {}
    if given.get("enabled") is False or given.get("effort") == "none":
        return False
    return any(given.get(name) for name in ("enabled", "effort", "max_tokens", "summary"))


def _unsupported(param: str, why: str) -> InvalidRequest:
    return InvalidRequest("unsupported_parameter", f"{param} {why}.", param=param)
