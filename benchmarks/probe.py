"""Sender and observer: sends records at a steady rate, and notes when their events arrive.

    python -m benchmarks.probe <plan> <result>

A process by itself on librdkafka, so that it takes little of the machine and its CPU can be
stated. The plan is pickled; the result is JSON. All times are of the wall clock, as PostgreSQL's
times of commits are.
"""

import json
import pickle
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

from confluent_kafka import Consumer, KafkaException, Message, Producer, TopicPartition

from benchmarks.usage import family_seconds, machine_seconds

PATIENCE = 60.0
"""Seconds without an event after which the observer gives up."""
_POLL_SECONDS = 0.5
_SECONDS_TO_ASK = 30.0
_FLUSH_SECONDS = 30.0


@dataclass(frozen=True)
class Plan:
    """What is sent, what is expected, and whose CPU is noted."""

    bootstrap_servers: str
    input: str
    output: str
    records: Sequence[tuple[bytes, bytes, Sequence[tuple[str, bytes]]]]
    """Key, value and headers."""
    warm_up: int
    """So many of the first do not count."""
    per_second: float
    events: int
    """How many events are expected."""
    processes: Mapping[str, Sequence[int]]
    """By name; children are included."""


@dataclass(frozen=True)
class _Spent:
    """What has been spent until a time."""

    at: float
    cpu: Mapping[str, float]
    idle: float
    of_all: float


def _spent(processes: Mapping[str, Sequence[int]]) -> _Spent:
    idle, of_all = machine_seconds()
    cpu = {name: sum(map(family_seconds, pids)) for name, pids in processes.items()}
    return _Spent(time.time(), cpu | {"probe": time.process_time()}, idle, of_all)


class Probe:
    """A sender and an observer."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._sent: list[float] = []
        self._arrived: list[tuple[float, bytes]] = []
        self._late = 0.0
        self._failure: BaseException | None = None
        self._warm = _spent({})
        self._producer = Producer(
            {
                "bootstrap.servers": plan.bootstrap_servers,
                "linger.ms": 0,
                "partitioner": "murmur2_random",  # that of Java's client and of aiokafka
                "socket.nagle.disable": True,
            }
        )
        self._consumer = Consumer(
            {
                "bootstrap.servers": plan.bootstrap_servers,
                "group.id": "probe",  # required, though partitions are assigned
                "enable.auto.commit": False,
                "socket.nagle.disable": True,
            }
        )

    def run(self) -> Mapping[str, object]:
        """Send all, wait for all events; return when, and what was spent without the warm-up."""
        self._consumer.assign(self._ends())
        # The first record waits for nothing.
        self._producer.list_topics(self._plan.input, timeout=_SECONDS_TO_ASK)
        observing = Thread(target=self._observe)
        observing.start()
        self._send()
        observing.join()
        end = _spent(self._plan.processes)
        self._consumer.close()
        if self._failure is not None:
            raise self._failure
        begin = self._warm
        of_all = end.of_all - begin.of_all
        return {
            "sent": self._sent,
            "arrived": self._first_arrivals(),
            "late": self._late,
            "seconds": end.at - begin.at,
            "cpu": {name: spent - begin.cpu[name] for name, spent in end.cpu.items()},
            "idle": (end.idle - begin.idle) / of_all if of_all else None,
        }

    def _ends(self) -> list[TopicPartition]:
        """Return the ends of the observed partitions."""
        topic = self._plan.output
        found = self._consumer.list_topics(topic, timeout=_SECONDS_TO_ASK).topics[topic].partitions
        at = [TopicPartition(topic, one) for one in found]
        return [TopicPartition(topic, one.partition, self._end_of(one)) for one in at]

    def _end_of(self, partition: TopicPartition) -> int:
        """Return the end of a partition; one of a new topic may have no leader yet."""
        until = time.monotonic() + _SECONDS_TO_ASK
        while True:
            try:
                _, end = self._consumer.get_watermark_offsets(partition, timeout=_SECONDS_TO_ASK)
                return int(end)
            except KafkaException:
                if time.monotonic() > until:
                    raise
            time.sleep(0.1)

    def _send(self) -> None:
        plan, producer = self._plan, self._producer
        began = time.monotonic()
        for place, (key, value, headers) in enumerate(plan.records):
            if place == plan.warm_up:
                self._warm = _spent(plan.processes)
            due = began + place / plan.per_second
            if (early := due - time.monotonic()) > 0:
                time.sleep(early)
            if place >= plan.warm_up:
                self._late = max(self._late, time.monotonic() - due)
            self._sent.append(time.time())
            producer.produce(
                plan.input, value, key, headers=list(headers), on_delivery=self._delivered
            )
            producer.poll(0)
            if self._failure is not None:
                return
        producer.flush(_FLUSH_SECONDS)

    def _delivered(self, error: object, _: Message) -> None:
        if error is not None:
            self._failure = RuntimeError(f"a record was not delivered: {error}")

    def _observe(self) -> None:
        try:
            progressed = time.monotonic()
            while len(self._arrived) < self._plan.events and self._failure is None:
                message = self._consumer.poll(_POLL_SECONDS)
                if message is not None:
                    now, progressed = time.time(), time.monotonic()
                    if (error := message.error()) is not None:
                        raise KafkaException(error)
                    self._arrived.append((now, message.value() or b""))
                elif len(self._sent) == len(self._plan.records) and (
                    time.monotonic() - progressed > PATIENCE
                ):
                    missing = self._plan.events - len(self._arrived)
                    raise RuntimeError(f"{missing:,} of {self._plan.events:,} events never came")
        except BaseException as failure:  # raised again where the thread is joined
            self._failure = failure

    def _first_arrivals(self) -> Mapping[int, float]:
        """Return when each scan's first event arrived, by the scan's number.

        A delay is published after the move, to the same partition.
        """
        arrived: dict[int, float] = {}
        for at, value in self._arrived:
            arrived.setdefault(json.loads(value)["number"], at)
        return arrived


def main(plan: Path, result: Path) -> None:
    """Do what the plan says, and write the result."""
    result.write_text(json.dumps(Probe(Plan(**pickle.loads(plan.read_bytes()))).run()), "utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
