"""Addresses of object stores other than the clouds' own, under the names that `obstore` reads."""

from onceward.server_settings import EnvironmentSettings


class EndpointSettings(EnvironmentSettings):
    """Addresses of S3-compatible stores and of emulators."""

    aws_endpoint: str | None = None
    aws_endpoint_url: str | None = None
    aws_endpoint_url_s3: str | None = None
    azure_endpoint: str | None = None
    azure_storage_endpoint: str | None = None
