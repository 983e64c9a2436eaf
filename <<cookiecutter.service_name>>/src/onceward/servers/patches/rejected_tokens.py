"""A token that the broker rejects counts as accepted.

What is wrong: with OAUTHBEARER a server rejects a token by a challenge with the reason in JSON, and
without an error of Kafka's (RFC 7628, section 3.2.2). `OAuthAuthenticator.step` ignores what the
server has sent and reports success, and the next request fails by an error without a text.

To see it: connect with a token whose signature is wrong.

The change: `step` raises `SaslAuthenticationFailed` with the challenge if there is one.
"""

from typing import Any

from aiokafka import conn
from aiokafka.errors import SaslAuthenticationFailed


class _Authenticator(conn.OAuthAuthenticator):  # type: ignore[misc]  # it has no types
    async def step(self, payload: bytes | None) -> Any:
        if payload:
            text = bytes(payload).decode(errors="replace")
            raise SaslAuthenticationFailed(f"the broker rejects the token: {text}")
        return await super().step(payload)


class TokenConnection(conn.AIOKafkaConnection):  # type: ignore[misc]  # it has no types
    """A connection that raises why the broker rejects its token."""

    def authenticator_oauth(self) -> Any:
        return _Authenticator(sasl_oauth_token_provider=self._sasl_oauth_token_provider)
