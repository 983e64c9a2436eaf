"""The service: its name, its handlers, its tables. `service` on the command line is `main`."""

from onceward import Service
# <% if cookiecutter.object_store == "yes" %>
from onceward.archive import Archive, ArchiveSettings
from onceward.archive.commands import group as archive_commands
from onceward.claims import ClaimSettings, open_claims
from onceward.claims.commands import app as claims_commands
# <% endif %>
from onceward.cli.commands import command_line
from onceward.contracts.commands import group as schema_commands
# <% if cookiecutter.debezium == "yes" %>
from onceward.debezium.commands import app as debezium_commands
# <% endif %>
# <% if cookiecutter.outside_calls == "yes" %>
from onceward.effects import EffectSettings, EffectWorkers
# <% endif %>
# <% if cookiecutter.history == "yes" %>
from onceward.history.commands import app as history_commands
# <% endif %>
# <% if cookiecutter.http_api == "yes" %>
from onceward.http.commands import group as api_commands
# <% endif %>
# <% if cookiecutter.object_store == "yes" %>
from onceward.object_store import EndpointSettings
# <% endif %>
# <% if cookiecutter.operations_page == "yes" %>
from onceward.page.commands import group as page_commands
# <% endif %>
# <% if cookiecutter.personal_data == "yes" %>
from onceward.personal import PersonalData, PersonalSettings
from onceward.personal.commands import group as personal_commands
# <% endif %>
# <% if cookiecutter.schema_registry == "yes" %>
from onceward.schema_registry import RegistrySettings
from onceward.schema_registry.commands import group as registry_commands
# <% endif %>

# <% set has_example = cookiecutter.worked_example not in ("no", "none") %>
# <% if has_example and cookiecutter.outside_calls == "yes" %>
from .handlers import handlers, open_resources
# <% else %>
from .handlers import handlers
# <% endif %>
from .tables import Base

NAME = "<<cookiecutter.service_name>>"

# <% if cookiecutter.object_store == "yes" %>
archive = Archive(NAME)
# <% endif %>
# <% if cookiecutter.personal_data == "yes" %>
personal = PersonalData()
# <% endif %>
service = Service(
    NAME,
    handlers=handlers,
    metadata=Base.metadata,
    package=__package__,
    # <% if cookiecutter.object_store == "yes" %>
    archive=archive,
    claims=open_claims,
    # <% endif %>
    # <% if cookiecutter.outside_calls == "yes" %>
    workers=[EffectWorkers],
    # <% endif %>
    # <% if cookiecutter.personal_data == "yes" %>
    encryption=personal,
    # <% endif %>
    # <% set packages = (cookiecutter.object_store, cookiecutter.outside_calls) %>
    # <% set more = (cookiecutter.personal_data, cookiecutter.schema_registry) %>
    # <% if "yes" in packages + more %>
    settings=[
        # <% if cookiecutter.object_store == "yes" %>
        ArchiveSettings,
        ClaimSettings,
        EndpointSettings,
        # <% endif %>
        # <% if cookiecutter.outside_calls == "yes" %>
        EffectSettings,
        # <% endif %>
        # <% if cookiecutter.personal_data == "yes" %>
        PersonalSettings,
        # <% endif %>
        # <% if cookiecutter.schema_registry == "yes" %>
        RegistrySettings,
        # <% endif %>
    ],
    # <% endif %>
    # <% if has_example and cookiecutter.outside_calls == "yes" %>
    resources=open_resources,
    # <% endif %>
)
main = command_line(
    service,
    # <% if cookiecutter.history == "yes" %>
    history_commands,
    # <% endif %>
    # <% if cookiecutter.http_api == "yes" %>
    api=api_commands(service, f"{__package__}.api"),
    # <% endif %>
    # <% if cookiecutter.object_store == "yes" %>
    archive=archive_commands(archive),
    claims=claims_commands,
    # <% endif %>
    # <% if cookiecutter.debezium == "yes" %>
    debezium=debezium_commands,
    # <% endif %>
    # <% if cookiecutter.operations_page == "yes" %>
    page=page_commands(
        service,
        # <% if cookiecutter.history == "yes" %>
        "onceward.history.views",
        # <% endif %>
    ),
    # <% endif %>
    # <% if cookiecutter.personal_data == "yes" %>
    personal=personal_commands(personal),
    # <% endif %>
    # <% if cookiecutter.schema_registry == "yes" %>
    registry=registry_commands(service),
    # <% endif %>
    schema=schema_commands(service),
)
