"""The service: its name, its handlers, its tables. `service` on the command line is `main`."""

# <% if cookiecutter.object_store == "yes" %>
from archive import Archive
from archive.commands import group as archive_commands
from claims import open_claims
from claims.commands import group as claims_commands
from pipeline import Service
from pipeline.commands import command_line

# <%- else %>
from pipeline import Service
from pipeline.commands import command_line

# <%- endif +%>

from .handlers import handlers
from .tables import Base

# <% if cookiecutter.object_store == "yes" %>
NAME = "<<cookiecutter.service_name>>"

archive = Archive(NAME)
service = Service(
    NAME, handlers=handlers, metadata=Base.metadata, archive=archive, claims=open_claims
)
main = command_line(service, archive=archive_commands(archive), claims=claims_commands(service))
# <% else %>
service = Service("<<cookiecutter.service_name>>", handlers=handlers, metadata=Base.metadata)
main = command_line(service)
# <% endif %>
