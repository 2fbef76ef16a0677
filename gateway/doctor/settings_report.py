"""Every setting with its value, where that came from, and what is risky about them together.

Secrets are told as set or not set. Of a URL, the user, the password and secret parameters are
hidden.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, Final, Literal, TypeAlias, TypedDict
from urllib.parse import parse_qsl, urlsplit

from pydantic import AliasChoices, SecretStr

from gateway.doctor.diagnosis import Diagnosis, note, problem, warning
from gateway.settings import FOREVER, RETENTION_ENDLESS, Settings

HIDDEN: Final = "•••"
PEPPER_FILE: Final = "pepper"
Origin: TypeAlias = Literal["environment", "file", "start", "default"]
_SECRET_NAME: Final = re.compile(r"pass|secret|token|key|signature|credential", re.I)
_USER: Final = re.compile(r"(?<=://)[^/\s]*@")


class SettingView(TypedDict):
    """A setting. ``origin`` is ``start`` if the process was started with it otherwise than by the
    environment; ``value`` is null if it is not set."""

    name: str
    value: str | None
    default: str | None
    origin: Origin
    is_secret: bool
    meaning: str


def describe(settings: Settings, environment: Mapping[str, str] | None = None) -> list[SettingView]:
    """Return all settings in the order of the code."""
    known = os.environ if environment is None else environment
    names = {name.upper() for name in known}
    found: list[SettingView] = []
    for field, info in Settings.model_fields.items():
        variable = variable_of(field)
        value, is_secret = getattr(settings, field), _is_secret(field)
        found.append(
            {
                "name": variable,
                "value": _shown(field, value),
                "default": _shown(field, info.default),
                "origin": _origin(settings, field, variable in names),
                "is_secret": is_secret,
                "meaning": meanings()[field],
            }
        )
    return found


def risks(settings: Settings) -> list[Diagnosis]:
    """Return what is risky about the settings, worst first; ``part`` names the variables."""
    order = ("problem", "warning", "note")
    return sorted(_risks(settings), key=lambda one: order.index(one.level))


def variable_of(field: str) -> str:
    """Return the environment variable of a setting."""
    alias = Settings.model_fields[field].validation_alias
    if isinstance(alias, AliasChoices):
        return str(alias.choices[-1])
    return f"TOLLGATE_{field.upper()}"


@cache
def meanings() -> Mapping[str, str]:
    """Return the sentence of each setting, from the code."""
    (tree,) = ast.parse(inspect.getsource(Settings)).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for before, after in pairwise(tree.body):
        match before, after:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = " ".join(text.split()).replace("``", "`")
    return found


def _is_secret(field: str) -> bool:
    return "SecretStr" in str(Settings.model_fields[field].annotation)


def _shown(field: str, value: Any) -> str | None:
    if _is_secret(field):
        is_set = isinstance(value, SecretStr) and bool(value.get_secret_value())
        return "set" if is_set else None
    if value is None:
        return FOREVER if field in RETENTION_ENDLESS else None
    if isinstance(value, bool):
        return "true" if value else "false"
    return without_secrets(str(value)) or None


def without_secrets(text: str) -> str:
    """Hide the user, the password and secret parameters of a URL in a text."""
    if "://" not in text:
        return text
    text = _USER.sub(f"{HIDDEN}@", text)
    query = urlsplit(text).query
    hidden = [
        (name, HIDDEN if _SECRET_NAME.search(name) else value)
        for name, value in parse_qsl(query, keep_blank_values=True)
    ]
    if all(value != HIDDEN for _, value in hidden):
        return text
    return text.replace(query, "&".join(f"{name}={value}" for name, value in hidden))


def _origin(settings: Settings, field: str, is_variable: bool) -> Origin:
    if field not in settings.model_fields_set:
        if field == "pepper" and (settings.home / PEPPER_FILE).is_file():
            return "file"
        return "default"
    return "environment" if is_variable else "start"


def _risks(settings: Settings) -> Iterator[Diagnosis]:
    public = settings.public_url
    is_open = settings.host not in ("127.0.0.1", "localhost", "::1")
    if settings.console and settings.console_insecure:
        yield problem(
            "TOLLGATE_CONSOLE_INSECURE",
            "People enter the console without TLS: others in the network can read their cookie.",
            "Serve https, set TOLLGATE_PUBLIC_URL, and remove this setting.",
        )
    if public is not None and public.startswith("http://") and is_open:
        yield warning(
            "TOLLGATE_PUBLIC_URL",
            "Clients send keys and contents without TLS.",
            "Put a proxy with a certificate before the gateway, and use its https:// address.",
        )
    if settings.console and settings.console_key_login and settings.oidc_issuer:
        yield warning(
            "TOLLGATE_CONSOLE_KEY_LOGIN",
            "A key opens the console beside the provider, past its second factor.",
            "Set it to false if people enter through the provider.",
        )
    if is_open and public is None:
        yield warning(
            "TOLLGATE_PUBLIC_URL",
            f"The gateway listens on {settings.host} and does not know its address: people enter "
            "the console on this machine only, and URLs in webhooks are those of the machine.",
            "Set the address that clients use.",
        )
    yield from _open_doors(settings)
    yield from _stores(settings)
    yield from _incomplete(settings)


def _open_doors(settings: Settings) -> Iterator[Diagnosis]:
    if settings.metrics == "open":
        yield warning(
            "TOLLGATE_METRICS",
            "Everybody who reaches the gateway can read its metrics.",
            "Use `key`, and TOLLGATE_METRICS_TOKEN for the scraper.",
        )
    if "*" in settings.allowed_origins:
        yield warning(
            "TOLLGATE_CORS_ORIGINS",
            "Every web page may call the gateway with a key that its visitor gives it.",
            "Name the origins of your pages.",
        )
    for name, what in (("fetch", "URLs from clients"), ("webhook", "Webhooks")):
        if getattr(settings, f"{name}_private_addresses"):
            yield warning(
                f"TOLLGATE_{name.upper()}_PRIVATE_ADDRESSES",
                f"{what} may reach servers of your private network.",
                "Remove it outside of tests.",
            )
    if settings.smtp_host is not None and settings.smtp_security == "none":
        yield warning(
            "TOLLGATE_SMTP_SECURITY", "Notices are sent in the clear.", "Use starttls or tls."
        )
    if settings.log_level.upper() == "DEBUG":
        yield warning("TOLLGATE_LOG_LEVEL", "The log has internals of every request.", "Use INFO.")


def _stores(settings: Settings) -> Iterator[Diagnosis]:
    is_sqlite = settings.sqlite_file is not None
    if is_sqlite and settings.processes > 1:
        yield warning(
            "TOLLGATE_PROCESSES",
            f"{settings.processes} processes share one SQLite file, which one of them writes at a "
            "time.",
            "Use PostgreSQL, or one process.",
        )
    if not is_sqlite and settings.pepper is None:
        yield note(
            "TOLLGATE_PEPPER",
            "Keys are hashed with the file `pepper` in the home of this machine.",
            "Set the same value on every machine before you add a second gateway.",
        )
    if not is_sqlite and settings.blob_url is None:
        yield note(
            "BLOB_URL",
            "Files and outputs are in a directory of this machine.",
            "Use a store that all gateways and workers share.",
        )


def _incomplete(settings: Settings) -> Iterator[Diagnosis]:
    if settings.stripe_api_key is not None and settings.public_url is None:
        yield warning(
            "STRIPE_API_KEY",
            "After a payment, Stripe leads people to an address that only this machine has.",
            "Set TOLLGATE_PUBLIC_URL.",
        )
    if settings.gpu_hour_usd is None:
        yield note(
            "TOLLGATE_GPU_HOUR_USD",
            "Device time without a price in `gpu_hours` of the catalog is left out of margins.",
            "Set what an hour of a device costs you.",
        )
    if settings.smtp_host is None:
        yield note(
            "TOLLGATE_SMTP_HOST", "Notices are not sent by mail.", "Set a mail server to do so."
        )


def is_changed(view: SettingView) -> bool:
    """Whether a setting has another value than its default."""
    return view["value"] != view["default"] or view["origin"] == "file"


def matching(views: Sequence[SettingView], words: str | None) -> list[SettingView]:
    """Return the settings whose name or meaning has all of the words."""
    asked = (words or "").lower().split()
    return [
        one
        for one in views
        if all(word in f"{one['name']} {one['meaning']}".lower() for word in asked)
    ]
