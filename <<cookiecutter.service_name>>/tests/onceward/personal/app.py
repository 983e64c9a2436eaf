"""A clinic as a program: `python -m tests.onceward.personal.app`."""

from onceward.cli.commands import command_line
from onceward.personal import PersonalData
from onceward.personal.commands import group

from .clinic import Clinic

if __name__ == "__main__":
    personal = PersonalData()
    clinic = Clinic(visits="visits", letters="letters", name="applier")
    command_line(clinic.service(personal), personal=group(personal))()
