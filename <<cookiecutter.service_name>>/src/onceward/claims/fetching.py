"""Fetching: items that refer to their data get it. What the backlog stores is the reference."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from onceward.apply.claim_check import DataUnavailable
from onceward.apply.item import Item
from onceward.errors import StoreUnavailable
from onceward.events.message import Message, Reference
from onceward.events.payload import payload_hash

_LONG = 256 * 1024
"""Bytes whose hash would block the event loop for noticeably long."""

Fetch = Callable[[Reference], Awaitable[bytes]]
"""Returns the data. Raises `DataUnavailable`, and `StoreUnavailable`."""


async def resolve(
    items: Sequence[Item], fetch: Fetch, largest: int, memory: float
) -> Sequence[Item]:
    """Return the items with their data, or as many of the first ones as fit into the memory.

    `largest` is the most that data may have, by itself and together. See `ClaimCheck.resolve`.
    Raises `StoreUnavailable`.
    """
    references = dict.fromkeys(filter(None, (item.message.reference for item in items)))
    chosen = _fitting(references, largest, min(largest, memory))
    found = dict(zip(chosen, await _fetch(chosen, fetch), strict=True))
    with_data: list[Item] = []
    for item in items:
        reference = item.message.reference
        if reference is None:
            with_data.append(item)
            continue
        data = found.get(reference)
        if isinstance(data, StoreUnavailable) and not with_data:
            raise data
        if data is None or isinstance(data, StoreUnavailable):
            break
        with_data.append(await _with_data(item, reference, data))
    return with_data


def _fitting(references: Mapping[Reference, None], largest: int, memory: float) -> list[Reference]:
    """Return the first of them whose data fits into so many bytes together."""
    chosen: list[Reference] = []
    total = 0
    for reference in references:
        # One without a length may be the largest. One that is larger is not fetched.
        total += largest if reference.length is None else min(reference.length, largest)
        if total > memory:
            break
        chosen.append(reference)
    return chosen


async def _fetch(
    references: Sequence[Reference], fetch: Fetch
) -> list[bytes | DataUnavailable | StoreUnavailable]:
    found: list[bytes | DataUnavailable | StoreUnavailable] = []
    for one in await asyncio.gather(*map(fetch, references), return_exceptions=True):
        if isinstance(one, BaseException) and not isinstance(
            one, DataUnavailable | StoreUnavailable
        ):
            raise one
        found.append(one)
    return found


async def _with_data(item: Item, reference: Reference, found: bytes | DataUnavailable) -> Item:
    if isinstance(found, DataUnavailable):
        return item._replace(fault=found)
    message = item.message
    message = message._replace(data=found, hash=await _hash(message, found), reference=None)
    # Data that was there when the message was stored, and has no checksum.
    if item.stored is not None and item.stored.mismatch(message):
        text = f"{reference.uri} has other data than before: put it back"
        return item._replace(fault=DataUnavailable("data changed", text))
    return item._replace(message=message)


async def _hash(message: Message, data: bytes) -> bytes:
    if len(data) <= _LONG:
        return payload_hash(message.type, message.content_type, data)
    return await asyncio.to_thread(payload_hash, message.type, message.content_type, data)
