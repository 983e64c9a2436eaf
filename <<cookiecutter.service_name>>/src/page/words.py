"""The words of the page, in plain sentences: shown on a page, and where the pointer rests."""

from collections.abc import Mapping

WORDS: Mapping[str, str] = {
    "Kafka lag": "Records that are in Kafka and were not read yet, of all partitions together.",
    "Read": "Records that the service moves past in a second.",
    "Duplicates": "Messages that came again: they took effect before, and are skipped.",
    "Backlog": "Messages that could not be applied yet. They are tried again, or wait behind an"
    " earlier one of their key.",
    "Dead letters": "Messages that no further attempt will help. They stay until a person redrives"
    " or discards them.",
    "Outbox": "Events that were committed and are not in Kafka yet.",
    "Published": "Events that relays send to Kafka in a second.",
    "Dead events": "Events that Kafka has rejected. They stay until a person decides on them.",
    "Scheduled": "Events that are published at a later time, unless they are cancelled.",
    "Relays": "Processes that publish the outbox. It has 64 shards, each of which belongs to one"
    " relay at a time; a key is always in the same shard.",
    "Partitions": "Parts of the topics that the service reads. Each is read in order, by one"
    " process.",
    "Attempts": "Calls of the handler that have failed. An outage of PostgreSQL or Kafka counts"
    " none.",
    "Redrive": "Try again, in the order of the key and with a new number of attempts. What took"
    " effect meanwhile is recognised as a duplicate.",
    "Discard": "Give up: it is not applied. Its row stays for a time, so that the message is"
    " recognised if it comes again; what waited for it goes on.",
    "Held": "A partition of the outbox or the inbox that is old enough to be dropped, and that"
    " something still needs.",
    "Key": "The key of the record in Kafka. Messages of one key are applied in order; one that"
    " fails holds up its own key alone.",
    "Consumer": "The name of a handler, by which the inbox remembers what it has applied.",
}
"""What each word means; headings of the overview among them."""
