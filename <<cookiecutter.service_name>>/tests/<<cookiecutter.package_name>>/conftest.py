"""What your tests share: the service that the fixture `harness` runs."""

import pytest

from onceward import Service

from <<cookiecutter.package_name>>.main import service


@pytest.fixture(scope="session")
def harness_service() -> Service:
    """Return the service whose handlers are tested."""
    return service
# <% if cookiecutter.personal_data == "yes" %>


@pytest.fixture(autouse=True)
def master_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a master key of the tests' own."""
    monkeypatch.setenv("PIPELINE_PERSONAL_KEYS", "dGhpcyBtYXN0ZXIga2V5IGlzIGZvciB0ZXN0cyBvbmw=")
# <% endif %>
# <% if cookiecutter.worked_example in ("parcels", "yes") and cookiecutter.outside_calls == "yes" %>


@pytest.fixture(autouse=True)
def no_webhook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore the webhook of the environment: a test that needs one sets its own."""
    monkeypatch.setattr("<<cookiecutter.package_name>>.handlers.webhook", None)
# <% elif cookiecutter.worked_example == "payments" and cookiecutter.outside_calls == "yes" %>


@pytest.fixture(autouse=True)
def no_bank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore the bank of the environment: a test that needs one sets its own."""
    monkeypatch.delenv("BANK_URL", raising=False)
# <% endif %>
