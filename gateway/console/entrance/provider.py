"""A provider of OpenID Connect: its addresses and keys, and the tokens that it signs.

Needs the extra ``oidc``. Everything that a provider sends is checked: signature, issuer, audience,
expiry, nonce. Algorithms come from a list of our own, never from a token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

import httpx2
from authlib.common.errors import AuthlibBaseError
from authlib.integrations.httpx_client import AsyncOAuth2Client
from joserfc import jwt
from joserfc.errors import InvalidKeyIdError, JoseError
from joserfc.jwk import KeySet
from joserfc.jwt import ClaimsOption

from gateway.console.entrance.logins import Login, LoginFailed
from gateway.operations.entrance.providers import SUBJECT_MAX
from gateway.settings import Settings

ALGORITHMS: Final = (
    *("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    *("ES256", "ES384", "ES512", "EdDSA", "Ed25519"),
)
TIMEOUT_S: Final = 10.0
METADATA_S: Final = 3600.0
KEYS_S: Final = 300.0
"""Time for which keys are cached; a token with an unknown key fetches them again after less."""
KEYS_AGAIN_S: Final = 10.0
LEEWAY_S: Final = 30
LOGOUT_EVENT: Final = "http://schemas.openid.net/event/backchannel-logout"


class IdentityProvider:
    def __init__(self, settings: Settings) -> None:
        assert settings.oidc_issuer is not None
        self._settings = settings
        self._issuer = settings.oidc_issuer.rstrip("/")
        self._metadata: tuple[float, Mapping[str, Any]] | None = None
        self._keys: tuple[float, KeySet] | None = None
        self._lock = asyncio.Lock()

    @property
    def issuer(self) -> str:
        return self._issuer

    async def address(self, login: Login, redirect: str, *, again: bool) -> str:
        """Return the address of the provider's login. ``again``: also for a person who is logged in
        there."""
        metadata = await self._read_metadata()
        more = {"prompt": "login", "max_age": "0"} if again else {}
        async with self._client(redirect) as client:
            url, _ = client.create_authorization_url(
                metadata["authorization_endpoint"],
                state=login.state,
                code_verifier=login.verifier,
                nonce=login.nonce,
                **more,
            )
        return str(url)

    async def claims(self, login: Login, code: str, redirect: str) -> Mapping[str, Any]:
        """Exchange a code for the claims of the person. Raise ``LoginFailed``."""
        metadata = await self._read_metadata()
        async with self._client(redirect) as client:
            try:
                tokens = await client.fetch_token(
                    metadata["token_endpoint"], code=code, code_verifier=login.verifier
                )
                claims = await self._decode(tokens.get("id_token", ""), nonce=login.nonce)
                if len(str(claims["sub"])) > SUBJECT_MAX:
                    raise LoginFailed("the subject is too long")
                return {**await self._user(client, metadata, claims), **claims}
            except (AuthlibBaseError, httpx2.HTTPError, ValueError) as error:
                raise LoginFailed(f"the code was not accepted: {error}") from error

    async def logout(self, token: str) -> tuple[str | None, str | None]:
        """Return subject and session of a token by which the provider ends sessions. Raise
        ``LoginFailed``."""
        claims = await self._decode(token, nonce=None)
        if LOGOUT_EVENT not in (claims.get("events") or {}) or "nonce" in claims:
            raise LoginFailed("this is not a logout token")
        return _text(claims.get("sub")), _text(claims.get("sid"))

    async def _user(
        self, client: AsyncOAuth2Client, metadata: Mapping[str, Any], claims: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Return what the provider tells about the person besides the token, such as groups."""
        url = metadata.get("userinfo_endpoint")
        if self._settings.oidc_groups in claims or url is None:
            return {}
        answer = await client.get(url)
        answer.raise_for_status()
        found = answer.json()
        # An answer about another person is not this one's.
        return found if found.get("sub") == claims["sub"] else {}

    async def _decode(self, token: str, *, nonce: str | None) -> Mapping[str, Any]:
        """Check a token. Raise ``LoginFailed``."""
        try:
            try:
                found = jwt.decode(token, await self._read_keys(KEYS_S), algorithms=ALGORITHMS)
            except InvalidKeyIdError:
                # The provider has new keys.
                again = await self._read_keys(KEYS_AGAIN_S)
                found = jwt.decode(token, again, algorithms=ALGORITHMS)
            checks: dict[str, ClaimsOption] = {
                # As the provider writes it, with or without a slash at its end.
                "iss": {"essential": True, "value": (await self._read_metadata())["issuer"]},
                "aud": {"essential": True, "value": self._settings.oidc_client_id},
                "iat": {"essential": True},
            }
            if nonce is not None:
                checks["nonce"] = {"essential": True, "value": nonce}
                checks |= {"exp": {"essential": True}, "sub": {"essential": True}}
            jwt.JWTClaimsRegistry(None, LEEWAY_S, **checks).validate(found.claims)
        except (JoseError, ValueError, TypeError) as error:
            raise LoginFailed(f"a token is not valid: {error}") from error
        return found.claims

    async def _read_metadata(self) -> Mapping[str, Any]:
        if self._metadata is None or time.monotonic() - self._metadata[0] > METADATA_S:
            found = await self._get(f"{self._issuer}/.well-known/openid-configuration")
            if str(found.get("issuer", "")).rstrip("/") != self._issuer:
                raise LoginFailed(f"the provider calls itself {found.get('issuer')!r}")
            self._metadata = time.monotonic(), found
        return self._metadata[1]

    async def _read_keys(self, seconds: float) -> KeySet:
        async with self._lock:
            if self._keys is None or time.monotonic() - self._keys[0] > seconds:
                found = await self._get((await self._read_metadata())["jwks_uri"])
                self._keys = time.monotonic(), KeySet.import_key_set(found)  # type: ignore[arg-type]  # checked there
            return self._keys[1]

    async def _get(self, url: str) -> Mapping[str, Any]:
        try:
            async with httpx2.AsyncClient(timeout=TIMEOUT_S) as client:
                answer = await client.get(url)
                answer.raise_for_status()
                found: Mapping[str, Any] = answer.json()
                return found
        except (httpx2.HTTPError, ValueError) as error:
            host = urlsplit(url).hostname
            raise LoginFailed(f"{host} does not answer: {type(error).__name__}") from error

    def _client(self, redirect: str) -> AsyncOAuth2Client:
        settings, secret = self._settings, self._settings.oidc_client_secret
        return AsyncOAuth2Client(
            settings.oidc_client_id,
            None if secret is None else secret.get_secret_value(),
            scope=settings.oidc_scopes,
            redirect_uri=redirect,
            code_challenge_method="S256",
            timeout=TIMEOUT_S,
        )


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
