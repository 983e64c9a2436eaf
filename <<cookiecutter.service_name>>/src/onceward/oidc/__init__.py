"""Tokens for Kafka from an OIDC provider, by client credentials; see docs/cloud-login.md."""
