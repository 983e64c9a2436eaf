"""The protocol that a Kafka client has to fulfil is small, fulfilled, and all that is called."""

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest

from onceward import consume
from onceward.servers.consumer import KafkaConsumer
from onceward.servers.member import GroupMember

METHODS = {
    name: one
    for name, one in vars(GroupMember).items()
    if inspect.isfunction(one) and not name.startswith("_")
}


def test_a_member_has_at_most_fifteen_methods_and_each_is_documented() -> None:
    assert len(METHODS) <= 15
    assert [name for name, one in METHODS.items() if not one.__doc__] == []


@pytest.mark.parametrize("name", METHODS)
def test_the_consumer_takes_the_arguments_of_the_protocol(name: str) -> None:
    ours, theirs = METHODS[name], getattr(KafkaConsumer, name)
    assert inspect.iscoroutinefunction(theirs) == inspect.iscoroutinefunction(ours)
    by_kind: dict[bool, list[str]] = {True: [], False: []}
    for parameter in inspect.signature(ours).parameters.values():
        by_kind[parameter.kind is parameter.KEYWORD_ONLY].append(parameter.name)
    keywords: dict[str, Any] = dict.fromkeys(by_kind[True])
    inspect.signature(theirs).bind(*by_kind[False], **keywords)


def test_consume_calls_each_method_of_the_protocol_and_nothing_else() -> None:
    called: set[str] = set()
    for path in Path(consume.__path__[0]).glob("*.py"):
        source = path.read_text("utf-8")
        if "GroupMember" in source:
            called |= {
                node.attr
                for node in ast.walk(ast.parse(source))
                if isinstance(node, ast.Attribute)
                and ast.unparse(node.value) in ("client", "self._client")
            }
    assert called == METHODS.keys()
