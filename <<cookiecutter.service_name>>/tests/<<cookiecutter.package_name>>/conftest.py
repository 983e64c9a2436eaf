"""What your tests share: the service that the fixture `harness` runs."""

import pytest

from pipeline import Service

from <<cookiecutter.package_name>>.main import service


@pytest.fixture(scope="session")
def harness_service() -> Service:
    """Return the service whose handlers are tested."""
    return service
# <% if cookiecutter.worked_example == "yes" and cookiecutter.outside_calls == "yes" %>


@pytest.fixture(autouse=True)
def no_webhook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore the webhook of the environment: a test that needs one sets its own."""
    monkeypatch.setattr("<<cookiecutter.package_name>>.handlers.webhook", None)
# <% endif %>
