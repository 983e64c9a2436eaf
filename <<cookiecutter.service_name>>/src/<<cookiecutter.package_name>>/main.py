"""The service: its name, its handlers, its tables. `service` on the command line is `main`."""

from pipeline import Service
from pipeline.commands import command_line

from .handlers import handlers
from .tables import Base

service = Service("<<cookiecutter.service_name>>", handlers=handlers, metadata=Base.metadata)
main = command_line(service)
