"""Private names of libraries that the engine uses, each with the test that fails when it changes.

Any release of a library may rename them, or let them mean something else. A test here fails if a
name is gone, or if the engine uses one that the table does not have. Where the engine replaces a
class that aiokafka creates, the function `using` raises an error at import instead.
"""

import ast
import importlib
import inspect
import os
import pkgutil
import re
import sys
import traceback
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import asyncpg
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, codec
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.client import AIOKafkaClient
from aiokafka.cluster import ClusterMetadata
from aiokafka.conn import AIOKafkaConnection
from aiokafka.consumer.fetcher import Fetcher, FetchResult, PartitionRecords
from aiokafka.consumer.group_coordinator import GroupCoordinator
from aiokafka.producer.message_accumulator import MessageAccumulator
from aiokafka.producer.sender import Sender
from aiokafka.record import default_records
from opentelemetry import semconv
from opentelemetry.sdk.trace import ReadableSpan
from sqlalchemy.dialects.postgresql.asyncpg import AsyncAdapt_asyncpg_connection
from sqlalchemy.engine import Connection, NestedTransaction
from sqlalchemy.orm import Session
from sqlalchemy.orm.identity import IdentityMap

import onceward

from tests.onceward import rooms

TESTS = Path(__file__).parents[1]
LIBRARIES = {"aiokafka", "asyncpg", "sqlalchemy"}
"""Those whose classes the engine derives its own from."""
NOT_THE_ENGINE = ("onceward.migrations.", "onceward.testing.")
PUBLIC = {"_asdict", "_fields", "_replace"}
"""Documented names of named tuples."""


class Names(NamedTuple):
    """Private names of a class or module."""

    owner: Any
    names: str
    canary: str
    """The test that fails when they mean something else, in `tests/onceward`."""

    def __str__(self) -> str:
        return f"{self.owner.__module__ if isinstance(self.owner, type) else ''} {self.names}"


TABLE = [
    Names(
        AIOKafkaClient,
        "_conns _md_update_fut _sync_task",
        "integration/test_clients.py::"
        "test_a_producer_whose_broker_does_not_let_it_finish_is_cut_off",
    ),
    Names(
        AIOKafkaClient,
        "_get_conn _metadata_update",
        "integration/test_clients.py::test_without_the_patch_a_client_does_not_find_moved_brokers",
    ),
    Names(
        AIOKafkaConnection,
        "_writer",
        "integration/test_clients.py::"
        "test_a_consumer_and_a_producer_go_on_after_uvloop_would_not_write",
    ),
    Names(
        AIOKafkaConnection,
        "_sasl_oauth_token_provider",
        "integration/test_expiring.py::"
        "test_a_service_continues_without_loss_or_repetition_while_its_tokens_expire",
    ),
    Names(
        ClusterMetadata,
        "_brokers",
        "integration/test_clients.py::test_without_the_patch_a_client_does_not_find_moved_brokers",
    ),
    Names(
        ClusterMetadata,
        "_last_successful_refresh_ms",
        "integration/test_outages.py::test_the_service_survives_the_loss_of_leaders_and_replicas",
    ),
    Names(
        AIOKafkaConsumer,
        "_client _closed _coordinator _fetcher _subscription",
        "integration/test_clients.py::"
        "test_a_resting_partition_takes_no_memory_and_resumes_at_its_position",
    ),
    Names(
        AIOKafkaConsumer,
        "_request_timeout_ms",
        "integration/test_doctor.py::"
        "test_a_transaction_that_keeps_a_partition_from_being_read_is_told",
    ),
    Names(
        Fetcher,
        "_closed _create_fetch_waiter _loop _notify _records",
        "unit/test_patches.py::test_records_wake_the_readers_of_other_partitions_without_the_patch",
    ),
    Names(
        Fetcher,
        "_proc_fetch_request _fetch_max_wait_ms",
        "integration/test_clients.py::test_a_consumer_for_which_nothing_comes_asks_less_often",
    ),
    Names(
        Fetcher,
        "_max_partition_fetch_bytes _wait_consume_future",
        "integration/test_clients.py::"
        "test_a_resting_partition_takes_no_memory_and_resumes_at_its_position",
    ),
    Names(
        Fetcher,
        "_isolation_level",
        "integration/test_doctor.py::"
        "test_a_transaction_that_keeps_a_partition_from_being_read_is_told",
    ),
    Names(
        FetchResult,
        "_partition_records",
        "integration/test_clients.py::"
        "test_a_resting_partition_takes_no_memory_and_resumes_at_its_position",
    ),
    Names(
        PartitionRecords,
        "_records _unpack_records",
        "unit/test_record_batches.py::"
        "test_unpacked_data_is_released_with_its_records_even_if_unread",
    ),
    Names(
        codec,
        "_detect_xerial_stream",
        "unit/test_record_batches.py::test_blocks_of_snappy_that_lead_nowhere_end",
    ),
    Names(
        default_records,
        "_DefaultRecordBatchPy",
        "integration/test_nasty_records.py::"
        "test_records_around_a_non_utf8_header_name_arrive_once_each",
    ),
    Names(
        default_records._DefaultRecordBatchPy,
        "_buffer _maybe_uncompress",
        "integration/test_nasty_records.py::"
        "test_records_around_a_non_utf8_header_name_arrive_once_each",
    ),
    Names(
        GroupCoordinator,
        "_group_instance_id _heartbeat_task",
        "integration/test_static_membership.py::"
        "test_with_one_instance_id_the_later_process_serves_until_it_ends",
    ),
    Names(
        GroupCoordinator,
        "_do_rejoin_group _group_subscription _on_join_complete",
        "integration/test_static_membership.py::"
        "test_a_restarted_leader_keeps_its_partitions_and_assigns_added_ones",
    ),
    Names(
        GroupCoordinator,
        "_coordination_task",
        "integration/test_broker.py::test_a_rejected_group_member_says_why_and_joins_once_accepted",
    ),
    Names(
        GroupCoordinator,
        "_send_req",
        "integration/test_stamps.py::"
        "test_a_groups_second_database_is_refused_and_the_first_continues",
    ),
    Names(
        AIOKafkaProducer,
        "_message_accumulator",
        "integration/test_clients.py::"
        "test_a_producer_whose_broker_does_not_let_it_finish_is_cut_off",
    ),
    Names(
        MessageAccumulator,
        "_batches _pending_batches",
        "integration/test_clients.py::"
        "test_a_producer_whose_broker_does_not_let_it_finish_is_cut_off",
    ),
    Names(
        AIOKafkaProducer,
        "_sender",
        "unit/test_patches.py::"
        "test_without_the_patch_brokers_wait_for_replicas_until_the_request_timeout",
    ),
    Names(
        Sender,
        "_request_timeout_ms",
        "unit/test_patches.py::"
        "test_without_the_patch_brokers_wait_for_replicas_until_the_request_timeout",
    ),
    Names(
        AIOKafkaAdminClient,
        "_send_request",
        "integration/test_doctor.py::test_a_topic_that_is_missing_is_told",
    ),
    Names(
        Session,
        "_execute_internal",
        "integration/test_habits.py::test_a_batch_comes_out_as_plain_sqlalchemy_does",
    ),
    Names(
        Session,
        "_before_attach _merge",
        "integration/test_careless.py::test_a_row_kept_from_another_message_of_the_batch_is_refused",
    ),
    Names(
        Session,
        "_expire_state _expunge_states _new",
        "integration/test_careless.py::"
        "test_a_row_with_a_published_event_is_not_dropped_before_flush",
    ),
    Names(
        IdentityMap,
        "_modified",
        "integration/test_undone.py::"
        "test_nothing_is_left_of_a_message_that_is_rejected_between_others",
    ),
    Names(
        Connection,
        "_execution_options",
        "integration/test_session.py::test_options_of_the_connection_end_with_their_message",
    ),
    Names(
        NestedTransaction,
        "_savepoint",
        "integration/test_undone.py::"
        "test_nothing_is_left_of_a_message_that_is_rejected_between_others",
    ),
    Names(
        AsyncAdapt_asyncpg_connection,
        "_start_transaction",
        "integration/test_round_trips.py::test_a_batch_of_any_size_takes_the_same_round_trips",
    ),
    Names(
        asyncpg.Connection,
        "_transport",
        "integration/test_interrupted.py::test_the_system_keeps_an_idle_connection_alive",
    ),
    Names(
        asyncpg.Connection,
        "_addr",
        "integration/test_doctor.py::"
        "test_an_address_that_tls_does_not_secure_is_told_with_its_setting",
    ),
    # Of the other libraries, and of Python.
    Names(
        ReadableSpan,
        "_attributes _events _name _status",
        "unit/test_redaction.py::test_exported_spans_contain_no_secret_and_are_otherwise_unchanged",
    ),
    Names(
        semconv,
        "_incubating",
        "unit/test_conventions.py::test_the_attributes_of_metrics_are_the_conventions",
    ),
    Names(
        traceback.TracebackException,
        "_str",
        "unit/test_logs.py::test_no_part_of_a_line_holds_a_secret",
    ),
    Names(
        Protocol,
        "_is_protocol",
        "unit/test_handlers.py::test_a_function_that_can_take_the_event_is_taken",
    ),
    Names(
        os,
        "_exit",
        "integration/test_killers.py::"
        "test_a_handler_that_swallows_its_cancellation_ends_the_process",
    ),
    Names(
        sys,
        "_current_frames",
        "integration/test_killers.py::"
        "test_a_handler_that_swallows_its_cancellation_ends_the_process",
    ),
]


def is_private(name: str) -> bool:
    """Return whether it is a private name, or a module's or a class's."""
    return bool(re.fullmatch(r"_[a-zA-Z]\w*", name)) and name not in PUBLIC


@cache
def defined(tree: ast.AST) -> set[str]:
    """Return the names that are defined: functions, classes, variables, attributes of `self`."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                found.add(name)
    return found


@cache
def used(tree: ast.AST) -> set[str]:
    """Return the private names that are used: attributes, imports, and names in strings."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name):
                found.add(name)
            case ast.ImportFrom(module=module, names=names):
                found |= {*(module or "").split("."), *(one.name for one in names)}
            case ast.Constant(value=str(name)) if name.islower():
                found.add(name)
    return {name for name in found if is_private(name)}


@cache
def source_of(one: Any) -> ast.Module:
    """Return the syntax tree of a class or a module; an empty one if it has no source in Python."""
    try:
        return ast.parse(dedent(inspect.getsource(one)))
    except (OSError, TypeError):
        return ast.Module([], [])


def modules() -> Iterator[ModuleType]:
    """Yield the modules of the engine."""
    for one in pkgutil.walk_packages(onceward.__path__, "onceward."):
        if rooms.have(one.name) and not f"{one.name}.".startswith(NOT_THE_ENGINE):
            yield importlib.import_module(one.name)


def classes_in(module: ModuleType) -> Iterator[type]:
    """Yield the classes that the module defines."""
    for one in vars(module).values():
        if inspect.isclass(one) and one.__module__ == module.__name__:
            yield one


def foreign(module: ModuleType) -> set[str]:
    """Return the private names of libraries that the module uses.

    A name that neither it nor a base class of the engine's defines is a library's, and so is one
    that a class has from a library's class, and uses or overrides.
    """
    tree = source_of(module)
    own, inherited = {*defined(tree)}, set[str]()
    for one in classes_in(module):
        names = used(source_of(one)) | {
            name for name in defined(source_of(one)) if is_private(name)
        }
        for base in one.__mro__[1:]:
            library = base.__module__.partition(".")[0]
            if library == "onceward":
                own |= defined(source_of(sys.modules[base.__module__]))
            elif library in LIBRARIES:
                inherited |= {name for name in names if has(base, name)}
    return (used(tree) - own) | inherited


def has(owner: Any, name: str) -> bool:
    """Return whether a class or a module has the name, or gives it to each of its objects."""
    bases = owner.__mro__ if isinstance(owner, type) else ()
    return hasattr(owner, name) or any(name in stored(base) for base in bases)


@cache
def stored(one: type) -> set[str]:
    """Return the names of attributes that a class gives to each of its objects."""
    return {
        node.attr
        for node in ast.walk(source_of(one))
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) == "self"
    }


def test_the_table_has_each_private_name_that_the_engine_uses() -> None:
    found: dict[str, set[str]] = {}
    for module in modules():
        for name in foreign(module):
            found.setdefault(name, set()).add(module.__name__)
    listed = {name for one in TABLE for name in one.names.split()}
    assert {name: places for name, places in found.items() if name not in listed} == {}
    assert listed - found.keys() == set()


@pytest.mark.parametrize("one", TABLE, ids=str)
def test_a_private_name_is_there_and_has_a_canary(one: Names) -> None:
    assert [name for name in one.names.split() if not has(one.owner, name)] == []
    path, _, canary = one.canary.partition("::")
    assert canary in defined(ast.parse((TESTS / path).read_text("utf-8")))


def test_a_use_that_the_table_lacks_is_found() -> None:
    code = """
from library._inner import thing
class Own(Base):
    def __init__(self):
        self._own = 1
    def use(self, other):
        setattr(self, "_named", other._theirs)
        return self._own, self._inherited, other._replace()
"""
    tree = ast.parse(code)
    assert used(tree) - defined(tree) == {"_inner", "_named", "_theirs", "_inherited"}
