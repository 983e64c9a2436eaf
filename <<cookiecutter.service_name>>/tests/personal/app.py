"""A clinic as a program: `python -m tests.personal.app`."""

from operate.commands import command_line
from personal import PersonalData
from personal.commands import group

from .clinic import Clinic

if __name__ == "__main__":
    personal = PersonalData()
    clinic = Clinic(visits="visits", letters="letters", name="desk")
    command_line(clinic.service(personal), personal=group(personal))()
