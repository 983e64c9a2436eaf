"""A service for the tests: a clinic that takes visits of patients and sends letters to them."""

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Annotated, Any
from uuid import uuid4

from pydantic import BaseModel

from onceward import Event, Handlers, Park, Policy, Reject, Service, Transaction
from onceward.effects import Effects, EffectWorkers
from onceward.personal import Personal, PersonalData

from tests.contract.bank import Base, Deposit

SECRET = "anna.planted@example.org"
"""What must not be found in a table."""


class Address(BaseModel):
    """Where a patient lives."""

    street: Annotated[str, Personal(of="patient")]
    country: str


class Visited(Event, type="visited"):
    """A patient was there."""

    patient: str
    email: Annotated[str, Personal(of="patient")]
    number: int
    note: Annotated[str | None, Personal(of="patient")] = None
    home: Address | None = None


class Noted(Event, type="noted"):
    """Something was noted, of which nothing but the note is personal."""

    patient: str
    note: Annotated[str | None, Personal(of="patient")]
    number: int = 0


class LetterSent(Event, type="letter.sent"):
    """A letter goes out."""

    patient: str
    email: Annotated[str, Personal(of="patient")]
    number: int


class NoteSent(Event, type="note.sent"):
    """A note goes out; without its text it still means something."""

    patient: str
    text: Annotated[str | None, Personal(of="patient")]
    number: int


def visit(
    number: int,
    *,
    patient: str = "p1",
    type: str = "visited",
    id: str | None = None,
    **members: object,
) -> Deposit:
    """Return the record of a visit."""
    payload = {"patient": patient, "email": SECRET, "number": number} | members
    if type == "noted":
        del payload["email"]
    value = json.dumps(payload).encode()
    return Deposit(number, patient, id=id or f"{type}-{number}", type=type, value=value)


class Clinic:
    """Takes visits. What becomes of one is said by `does`, by its number."""

    def __init__(self, visits: str, letters: str, name: str | None = None) -> None:
        self.letters = letters
        self.name = name or f"clinic-{uuid4().hex[:8]}"
        self.handled: list[Event] = []
        self.called: list[Event] = []
        self.does: dict[int, Callable[[Any, Transaction], None]] = {}
        self.handlers = Handlers()

        class Letter(LetterSent, type="letter.sent", topic=letters):
            pass

        class Note(NoteSent, type="note.sent", topic=letters):
            pass

        self.letter, self.note = Letter, Note

        @self.handlers.on(
            Visited, topic=visits, consumer="visit", policy=Policy(attempts=2, schedule=[0.01])
        )
        async def take(event: Visited, tx: Transaction) -> None:
            if act := self.does.get(event.number):
                act(event, tx)
            self.handled.append(event)

        @self.handlers.on(Noted, topic=visits, consumer="note", mode="deferred")
        async def note(event: Noted, tx: Transaction) -> None:
            if act := self.does.get(event.number):
                act(event, tx)
            self.handled.append(event)

        self.handlers.topic(visits, demands_types=True)

        @Effects(self.handlers).on(LetterSent, consumer="post")
        async def post(event: LetterSent, call: object) -> None:
            self.called.append(event)

    def service(self, encryption: PersonalData | None) -> Service:
        """Return the service."""
        return Service(
            self.name,
            handlers=self.handlers,
            metadata=Base.metadata,
            workers=[EffectWorkers],
            encryption=encryption,
        )

    def sends(self, event: Visited, tx: Transaction) -> None:
        """Publish a letter and a note."""
        tx.publish(
            self.letter(patient=event.patient, email=event.email, number=event.number),
            key=event.patient,
        )
        tx.publish(
            self.note(patient=event.patient, text=event.email, number=event.number),
            key=event.patient,
        )

    def schedules(self, event: Visited, tx: Transaction) -> None:
        """Publish a letter later."""
        letter = self.letter(patient=event.patient, email=event.email, number=event.number)
        tx.publish(letter, key=event.patient, after=timedelta(hours=1), name=f"n{event.number}")

    def calls(self, event: Visited, tx: Transaction) -> None:
        """Have a letter posted."""
        tx.call(LetterSent(patient=event.patient, email=event.email, number=event.number))


def parks(event: Visited, tx: Transaction) -> None:
    """Park it, and quote the address."""
    raise Park(f"no file of {event.email}", after=3_600)


def fails(event: Visited, tx: Transaction) -> None:
    """Fail, and quote the address as messages do."""
    raise ValueError(f"can't write to <{event.email}> or {event.email!r}")


def rejects(event: Visited, tx: Transaction) -> None:
    """Reject it."""
    raise Reject(f"{event.email} is not one of ours")
