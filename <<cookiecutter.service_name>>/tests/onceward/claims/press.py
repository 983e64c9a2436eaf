"""Two small services: a press that prints books as large as they are ordered, and their reader."""

import json
from dataclasses import dataclass, field
from typing import Any

from aiokafka import AIOKafkaProducer
from sqlalchemy.orm import DeclarativeBase

from onceward import Event, Handlers, Service, Transaction


class Base(DeclarativeBase):
    """Neither of them has tables."""


class Ordered(Event, type="ordered"):
    """Somebody wants a book."""

    title: str
    letters: int
    """Of the text, one byte each."""


class Printed(Event, type="printed"):
    """A book."""

    title: str
    text: str


@dataclass
class Press:
    """A press and its reader, with topics of their own."""

    orders: str
    books: str
    name: str
    read: list[tuple[str, int]] = field(default_factory=list)
    """Titles, and letters, of what was read; rolled back or not."""
    claims: Any = None

    def __post_init__(self) -> None:
        self.printing, self.reading = Handlers(), Handlers()

        class Book(Printed, type="printed", topic=self.books):
            pass

        @self.printing.on(Ordered, topic=self.orders, consumer="print")
        async def print_it(order: Ordered, tx: Transaction) -> None:
            tx.publish(Book(title=order.title, text=order.letters * "x"), key=order.title)

        @self.reading.on(Printed, topic=self.books, consumer="read")
        async def read(book: Printed, tx: Transaction) -> None:
            self.read.append((book.title, len(book.text)))

    @property
    def printer(self) -> Service:
        """The press as a service."""
        return Service(self.name, self.printing, Base.metadata, claims=self.claims)

    @property
    def reader(self) -> Service:
        """The reader as a service."""
        return Service(f"{self.name}-reader", self.reading, Base.metadata, claims=self.claims)

    async def order(
        self,
        producer: AIOKafkaProducer,
        title: str,
        letters: int,
        partition: int = 0,
        id: str | None = None,
    ) -> None:
        """Send an order; its id is the title unless it is given."""
        headers = {"specversion": "1.0", "id": id or title, "source": "/tests", "type": "ordered"}
        await producer.send_and_wait(
            self.orders,
            json.dumps({"title": title, "letters": letters}).encode(),
            key=title.encode(),
            partition=partition,
            headers=[
                *((f"ce_{name}", value.encode()) for name, value in headers.items()),
                ("content-type", b"application/json"),
            ],
        )


def letters_for(size: int, title: str) -> int:
    """Return how many letters the text of a book has whose payload has so many bytes."""
    return size - len(json.dumps({"title": title, "text": ""}, separators=(",", ":")))
