"""Fetching: events that refer to their data get it, before any transaction begins.

To handlers they look as if it had come with them. What is stored of them is still the reference.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from pipeline.errors import StoreUnavailable
from pipeline.events.message import Message
from pipeline.events.payload import payload_hash
from pipeline.events.references import Claims, DataChanged, DataElsewhere, Reference, Unresolved

from .batch import Batch, validated
from .item import IdentityMismatch, Item

_LONG = 256 * 1024
"""Bytes whose hash keeps the loop long enough for others to notice."""


async def fetch_batch(batch: Batch, claims: Claims | None) -> Batch:
    """Return the batch with its data, or the beginning of it where that is all there is room for.

    Raises `StoreUnavailable`.
    """
    # As when it is decoded: what is handled later is validated then.
    items = await fetch(batch.items, claims, lambda item: item.handler.mode == "immediate")
    if items is batch.items:
        return batch
    if len(items) < len(batch.items):
        batch = batch.between(batch.start, batch.items[len(items)].message.offset)
    return replace(batch, items=items)


async def fetch(
    items: Sequence[Item], claims: Claims | None, validates: Callable[[Item], bool]
) -> Sequence[Item]:
    """Return the items with their data, or as many of the first ones as there is room for, or as
    could be fetched.

    One whose data can't be had has that for its fault. Raises `StoreUnavailable` where the first
    can't be fetched now.
    """
    references = dict.fromkeys(filter(None, (item.message.reference for item in items)))
    if not references:
        return items
    found: Mapping[Reference, bytes | Unresolved | StoreUnavailable]
    if claims is None:
        error = DataElsewhere(
            "the event refers to data, and the service has no object store to fetch it from: set"
            " PIPELINE_CLAIM_URL to the one that the event's producer uses"
        )
        found = dict.fromkeys(references, error)
    else:
        chosen = _fitting(references, claims.memory)
        found = dict(zip(chosen, await _fetch(chosen, claims), strict=True))
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
        with_data.append(await _resolved(item, data, validates))
    return with_data


def _fitting(references: Mapping[Reference, None], memory: int) -> list[Reference]:
    """Return the first of them, at least one, whose data fits into so many bytes together."""
    chosen: list[Reference] = []
    total = 0
    for reference in references:
        # One that does not say how much it is takes all of it.
        total += memory if reference.length is None else reference.length
        if chosen and total > memory:
            break
        chosen.append(reference)
    return chosen


async def _fetch(
    references: Sequence[Reference], claims: Claims
) -> list[bytes | Unresolved | StoreUnavailable]:
    found: list[bytes | Unresolved | StoreUnavailable] = []
    fetching = (claims.fetch(reference) for reference in references)
    for one in await asyncio.gather(*fetching, return_exceptions=True):
        if isinstance(one, BaseException) and not isinstance(one, Unresolved | StoreUnavailable):
            raise one
        found.append(one)
    return found


async def _resolved(
    item: Item, found: bytes | Unresolved, validates: Callable[[Item], bool]
) -> Item:
    if isinstance(found, Unresolved):
        return item._replace(fault=found)
    message = item.message
    uri = message.reference.uri if message.reference else ""
    message = message._replace(data=found, hash=await _hash(message, found), reference=None)
    try:
        # Of data that was there when the message was stored, and comes without a checksum.
        if item.stored is not None:
            item.stored.check(message)
    except IdentityMismatch:
        return item._replace(fault=DataChanged(f"{uri} has other data than before: put it back"))
    item = item._replace(message=message)
    return validated(item) if validates(item) else item


async def _hash(message: Message, data: bytes) -> bytes:
    if len(data) <= _LONG:
        return payload_hash(message.type, message.content_type, data)
    return await asyncio.to_thread(payload_hash, message.type, message.content_type, data)
