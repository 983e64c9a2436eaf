"""A wire to Kafka on which requests can be held, answers be lost, and that can be cut."""

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from enum import IntEnum
from io import BytesIO

from aiokafka.protocol.admin import DescribeConfigsResponse_v2
from aiokafka.protocol.metadata import MetadataResponse_v5
from aiokafka.protocol.produce import ProduceRequest_v7, ProduceResponse_v7

_LEADER_NOT_AVAILABLE = 5
_TOPIC_AUTHORIZATION_FAILED = 29
_ELSEWHERE = 1_000_000
"""Added to the number of a partition, makes one that no topic has."""


class Api(IntEnum):
    """What a request asks for."""

    PRODUCE = 0
    FETCH = 1
    METADATA = 3
    FIND_COORDINATOR = 10
    JOIN_GROUP = 11
    LEAVE_GROUP = 13
    DESCRIBE_GROUPS = 15
    API_VERSIONS = 18
    INIT_PRODUCER_ID = 22
    DESCRIBE_CONFIGS = 32


class Wire:
    """Leads to a broker, which takes it for its own address.

    What is struck is records and their acknowledgements; all else passes while it is not shut.
    """

    def __init__(self, broker: str) -> None:
        self._host, _, port = broker.rpartition(":")
        self._broker_port = int(port)
        self._port = 0
        self._passes = asyncio.Event()
        self._passes.set()
        self._answers_left: int | None = None
        self._shut = False
        self._leaderless: str | None = None
        self._forbidden = ""
        self._closed = ""
        self._refusal = self._description = 0
        self._refused: dict[str, int] = {}
        self._open: set[asyncio.StreamWriter] = set()
        self._ignored: set[Api] = set()
        self.held = 0
        """Requests with records that wait for `go_on`."""
        self.lost = 0
        """Answers that were lost."""
        self.ignored = 0
        """Requests that were ignored."""
        self.knocks = 0
        """Connections that were asked for, taken or not."""
        self.waits: list[int] = []
        """For how many milliseconds each fetch lets the broker wait for records."""

    @property
    def address(self) -> str:
        """The bootstrap server for who shall go through it."""
        return f"{self._host}:{self._port}"

    @property
    def is_unused(self) -> bool:
        """Whether no client is connected."""
        return not self._open

    def ignore(self, *apis: Api) -> None:
        """Let these requests get no answer, as from a broker that hangs."""
        self._ignored = set(apis)

    def hold(self) -> None:
        """Let no records reach the broker; they do so, late, after `go_on`."""
        self._passes.clear()

    def lose_answers(self, *, after: int = 0) -> None:
        """Let records reach the broker, and lose its answers, but for the first few."""
        self._answers_left = after

    def shut(self) -> None:
        """Cut all connections and take no others, as a broker that has gone."""
        self._shut = True
        self.cut()

    def take_leaders(self, topic: str = "") -> None:
        """Cut all connections, and tell everybody that the topic, or each one, has no leader."""
        self._leaderless = topic
        self.cut()

    def forbid(self, topic: str) -> None:
        """Cut all connections, and tell everybody that the topic is not for them."""
        self._forbidden = topic
        self.cut()

    def close_configs(self, topic: str) -> None:
        """Tell everybody that the topic's configuration is not for them."""
        self._closed = topic

    def refuse_records(self, topic: str, code: int) -> None:
        """Keep records of the topic from the broker, and answer them by this error of it."""
        self._refused[topic] = code

    def refuse_members(self, code: int) -> None:
        """Answer those that want to join a group by this error of the broker."""
        self._refusal = code

    def refuse_descriptions(self, code: int) -> None:
        """Answer those that want to know who is in a group by this error of the broker."""
        self._description = code

    def cut(self) -> None:
        """Cut all connections, and take new ones."""
        for writer in self._open:
            writer.close()

    def go_on(self) -> None:
        """Be a good wire again."""
        self._answers_left = None
        self._shut = False
        self._leaderless = None
        self._ignored = set()
        self._forbidden = self._closed = ""
        self._refusal = self._description = 0
        self._refused = {}
        self._passes.set()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Join a client to the broker."""
        self.knocks += 1
        if self._shut:
            writer.close()
            return
        try:
            answers, broker = await asyncio.open_connection(self._host, self._broker_port)
        except OSError:
            writer.close()
            return
        self._open |= {writer, broker}
        asked: dict[bytes, str] = {}
        try:
            await asyncio.gather(
                self._requests(reader, broker, asked),
                self._answers(answers, writer, asked),
            )
        finally:
            self._open -= {writer, broker}

    async def _requests(
        self, reader: asyncio.StreamReader, broker: asyncio.StreamWriter, asked: dict[bytes, str]
    ) -> None:
        with suppress(asyncio.IncompleteReadError, OSError):
            while True:
                request = await _framed(reader)
                api, version = int.from_bytes(request[:2]), int.from_bytes(request[2:4])
                if api in self._ignored:
                    self.ignored += 1
                    continue
                if api == Api.PRODUCE:
                    await self._hold()
                    if self._loses_answer():
                        asked[request[4:8]] = "lost"
                    elif self._refused and version == 7:
                        asked[request[4:8]] = "records"
                        request = _elsewhere(request, self._refused)
                elif api == Api.FETCH:
                    after_name = 10 + int.from_bytes(request[8:10]) + 4
                    self.waits.append(int.from_bytes(request[after_name : after_name + 4]))
                elif api == Api.METADATA and version == 5:
                    asked[request[4:8]] = "metadata"
                elif api == Api.DESCRIBE_GROUPS and version >= 1:
                    asked[request[4:8]] = "groups"
                elif api == Api.JOIN_GROUP and version >= 2:
                    asked[request[4:8]] = "join"
                elif api == Api.DESCRIBE_CONFIGS and version == 2:
                    asked[request[4:8]] = "configs"
                broker.write(len(request).to_bytes(4) + request)
        broker.close()

    def _loses_answer(self) -> bool:
        if self._answers_left:
            self._answers_left -= 1
            return False
        return self._answers_left is not None

    async def _hold(self) -> None:
        self.held += 1
        await self._passes.wait()
        self.held -= 1

    async def _answers(
        self, answers: asyncio.StreamReader, client: asyncio.StreamWriter, asked: dict[bytes, str]
    ) -> None:
        with suppress(asyncio.IncompleteReadError, OSError):
            while True:
                answer = await _framed(answers)
                what = asked.pop(answer[:4], "")
                if what == "lost":
                    self.lost += 1
                    continue
                if what == "metadata" and self._leaderless is not None:
                    answer = answer[:4] + _without_leaders(answer[4:], self._leaderless)
                elif what == "metadata" and self._forbidden:
                    answer = answer[:4] + _without_topic(answer[4:], self._forbidden)
                elif what == "configs" and self._closed:
                    answer = answer[:4] + _without_configs(answer[4:], self._closed)
                elif what == "groups" and self._description:
                    answer = answer[:12] + self._description.to_bytes(2) + answer[14:]
                elif what == "join" and self._refusal:
                    answer = answer[:8] + self._refusal.to_bytes(2) + answer[10:]
                elif what == "records":
                    answer = answer[:4] + _refused(answer[4:], self._refused)
                # Metadata names the broker: by a host and a port, which becomes ours.
                here = self._host.encode() + self._port.to_bytes(4)
                there = self._host.encode() + self._broker_port.to_bytes(4)
                client.write(len(answer).to_bytes(4) + answer.replace(there, here))
        client.close()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator["Wire"]:
        """Take connections as long as the block lasts."""
        server = await asyncio.start_server(self.accept, self._host, 0)
        self._port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            self._passes.set()
            self.shut()


async def _framed(reader: asyncio.StreamReader) -> bytes:
    """Read a request or an answer; raises `IncompleteReadError` at the end."""
    return await reader.readexactly(int.from_bytes(await reader.readexactly(4)))


def _without_leaders(body: bytes, name: str) -> bytes:
    metadata = MetadataResponse_v5.decode(BytesIO(body))
    metadata.topics = [
        (
            *topic,
            [
                (_LEADER_NOT_AVAILABLE, partition, -1, *rest)
                if name in ("", topic[1])
                else (error, partition, leader, *rest)
                for error, partition, leader, *rest in partitions
            ],
        )
        for *topic, partitions in metadata.topics
    ]
    encoded: bytes = metadata.encode()
    return encoded


def _without_topic(body: bytes, name: str) -> bytes:
    metadata = MetadataResponse_v5.decode(BytesIO(body))
    metadata.topics = [
        (_TOPIC_AUTHORIZATION_FAILED, name, False, []) if topic[1] == name else topic
        for topic in metadata.topics
    ]
    encoded: bytes = metadata.encode()
    return encoded


def _without_configs(body: bytes, name: str) -> bytes:
    configs = DescribeConfigsResponse_v2.decode(BytesIO(body))
    configs.resources = [
        (_TOPIC_AUTHORIZATION_FAILED, "Topic authorization failed.", kind, topic, [])
        if topic == name
        else (code, message, kind, topic, entries)
        for code, message, kind, topic, entries in configs.resources
    ]
    encoded: bytes = configs.encode()
    return encoded


def _elsewhere(request: bytes, topics: Collection[str]) -> bytes:
    """Send records of these topics to partitions that are not there."""
    begin = 10 + int.from_bytes(request[8:10])
    produce = ProduceRequest_v7.decode(BytesIO(request[begin:]))
    produce.topics = [
        (
            topic,
            [
                (number + _ELSEWHERE if topic in topics else number, records)
                for number, records in partitions
            ],
        )
        for topic, partitions in produce.topics
    ]
    encoded: bytes = request[:begin] + produce.encode()
    return encoded


def _refused(body: bytes, codes: Mapping[str, int]) -> bytes:
    """Answer records that were sent elsewhere by the errors of their topics."""
    produced = ProduceResponse_v7.decode(BytesIO(body))
    produced.topics = [
        (
            topic,
            [
                (number - _ELSEWHERE, codes.get(topic, code), *rest)
                if number >= _ELSEWHERE
                else (number, code, *rest)
                for number, code, *rest in partitions
            ],
        )
        for topic, partitions in produced.topics
    ]
    encoded: bytes = produced.encode()
    return encoded
