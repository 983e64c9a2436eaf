"""Protobuf: payloads become JSON and are made of it by Protobuf's own JSON mapping."""

import base64
import binascii
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from confluent_kafka.schema_registry import Schema
from confluent_kafka.schema_registry.common.protobuf import _init_pool
from google.protobuf import json_format, message_factory
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from grpc_tools import protoc

from .formats import Misfit, text_of

_MAIN = "schema.proto"
_FILE = re.compile(r"(?=.{1,200}$)[A-Za-z0-9_][\w./-]*\.proto", re.ASCII)
"""Names that are an argument of protoc, and no option of it."""
_IMPORT = re.compile(r"""\bimport\s+(?:public\s+|weak\s+)?["']((?:google|confluent)/[^"']+)["']""")


class Protobuf:
    """The messages of a file, by the writer's schema: Protobuf needs no reader's."""

    kind = "PROTOBUF"
    content_type = "application/protobuf"

    def __init__(self, schema: Schema, references: Mapping[str, Schema]) -> None:
        """Raises errors of any type for an invalid schema."""
        known = DescriptorPool()
        _init_pool(known)  # Google's and Confluent's types, which are imported without a reference
        described = {file.name: file for file in _described(schema, references, known)}
        self._pool = DescriptorPool()
        _add(self._pool, _MAIN, described, known)
        main = described[_MAIN]
        package = f"{main.package}." if main.package else ""
        self.names: dict[str, list[int]] = dict(_indexes(main.message_type, package, []))
        self._by_indexes = {tuple(indexes): name for name, indexes in self.names.items()}

    def read(self, body: bytes, indexes: list[int] | None) -> tuple[str | None, bytes]:
        """Return the name of the message, and the message as JSON. Raises `Misfit`."""
        name = self._by_indexes.get(tuple(indexes or ()))
        if name is None:
            raise Misfit(f"the schema has no message at the indexes {indexes}")
        try:
            message = self._class(name).FromString(body)
            text = json_format.MessageToJson(
                message,
                preserving_proto_field_name=True,
                always_print_fields_with_no_presence=True,
                indent=None,
                ensure_ascii=False,
                descriptor_pool=self._pool,
            )
            return name, text.encode()
        except Exception as error:  # of several kinds; texts have values
            raise Misfit(f"it can't be read as {name} ({type(error).__name__})") from None

    def write(self, name: str, payload: bytes) -> bytes:
        """Return a message made of JSON. Raises `Misfit`."""
        message = self._class(name)()
        try:
            json_format.Parse(payload, message, descriptor_pool=self._pool)
            written: bytes = message.SerializeToString(deterministic=True)
            return written
        except json_format.ParseError as error:
            # What stands behind the field's name may be its value.
            raise Misfit(re.split(r": |\n", str(error), maxsplit=1)[0]) from None
        except Exception as error:
            raise Misfit(f"it can't be written as {name} ({type(error).__name__})") from None

    def _class(self, name: str) -> Any:
        return message_factory.GetMessageClass(self._pool.FindMessageTypeByName(name))


def _indexes(messages: Any, prefix: str, path: list[int]) -> Iterator[tuple[str, list[int]]]:
    message: DescriptorProto
    for place, message in enumerate(messages):
        indexes = [*path, place]
        yield prefix + message.name, indexes
        yield from _indexes(message.nested_type, f"{prefix}{message.name}.", indexes)


def _add(
    pool: DescriptorPool,
    name: str,
    described: Mapping[str, FileDescriptorProto],
    known: DescriptorPool,
) -> None:
    """Add a file to the pool, after those that it imports."""
    try:
        pool.FindFileByName(name)
        return
    except KeyError:
        pass
    file = described.get(name)
    if file is None:
        file = FileDescriptorProto.FromString(known.FindFileByName(name).serialized_pb)
    for imported in file.dependency:
        _add(pool, imported, described, known)
    pool.Add(file)


def _described(
    schema: Schema, references: Mapping[str, Schema], known: DescriptorPool
) -> Iterator[FileDescriptorProto]:
    """Yield the descriptors of the schema and of its references."""
    texts: dict[str, str] = {}
    given: dict[str, FileDescriptorProto] = {}
    for name, one in {**references, _MAIN: schema}.items():
        text = text_of(one)
        file = _serialized(name, text)
        if file is None:
            texts[name] = text
        else:
            given[name] = file
    yield from given.values()
    if texts:
        for name in (name for text in texts.values() for name in _IMPORT.findall(text)):
            if name not in texts:
                _collect(given, name, known)
        yield from _compiled(texts, given.values())


def _serialized(name: str, text: str) -> FileDescriptorProto | None:
    """Return the descriptor, if that is what Python's serializer has registered, in base64."""
    try:
        file = FileDescriptorProto.FromString(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError, DecodeError):
        return None
    file.name = name
    return file


def _collect(files: dict[str, FileDescriptorProto], name: str, known: DescriptorPool) -> None:
    """Add one of Google's or Confluent's files, behind those that it imports."""
    with suppress(KeyError):  # protoc says that it is missing
        if name in files:
            return
        file = FileDescriptorProto.FromString(known.FindFileByName(name).serialized_pb)
        for imported in file.dependency:
            _collect(files, imported, known)
        files[name] = file


def _compiled(
    texts: Mapping[str, str], given: Iterable[FileDescriptorProto]
) -> Iterator[FileDescriptorProto]:
    """Yield what protoc makes of the texts. Raises `OSError` without a folder for temporary files.

    Raises `ValueError` for what is wrong with the texts.
    """
    with TemporaryDirectory() as folder:
        for name, text in texts.items():
            _write(Path(folder, "in"), name, text)
        Path(folder, "given").write_bytes(FileDescriptorSet(file=given).SerializeToString())
        arguments = [
            "protoc",
            f"--proto_path={folder}/in",
            f"--descriptor_set_in={folder}/given",
            f"--descriptor_set_out={folder}/out",
            *texts,
        ]
        if protoc.main(arguments) != 0:
            Path(folder, "probe").write_bytes(bytes(2**16))  # raises if the disk is full
            raise ValueError("protoc does not compile it, and has written why to standard error")
        yield from FileDescriptorSet.FromString(Path(folder, "out").read_bytes()).file


def _write(folder: Path, name: str, text: str) -> None:
    path = Path(folder, name)
    if not _FILE.fullmatch(name) or not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{name!r} is no name of a file that can be imported")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    except (FileExistsError, IsADirectoryError, NotADirectoryError):
        raise ValueError(f"{name!r} is the name of a file and of a folder") from None
