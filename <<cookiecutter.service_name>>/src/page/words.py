"""The glossary of the page: a page of its own, and the tooltips of the overview's headings."""

from collections.abc import Mapping

WORDS: Mapping[str, str] = {
    "Kafka lag": "Records in Kafka that are not read yet, all partitions together.",
    "Read": "Records that the service reads per second.",
    "Duplicates": "Messages that were received again after they were applied. They are skipped.",
    "Backlog": "Messages that are not applied yet: a failed one is retried, the others wait behind"
    " an earlier message of their key.",
    "Calls": "Calls to other services that are stored and not made, or repeated after a failure."
    " How many are under way, and how long they take, only the metrics of the processes tell.",
    "Dead letters": "Messages that are not retried any more. They stay until an operator redrives"
    " or discards them.",
    "Outbox": "Committed events that are not in Kafka yet.",
    "Published": "Events that relays send to Kafka per second.",
    "Dead events": "Events that Kafka has rejected. They stay until an operator redrives or"
    " discards them.",
    "Scheduled": "Events that are published at a later time, unless they are cancelled.",
    "Paused": "What an operator has stopped or slowed down. It waits in its order.",
    "Relays": "Processes that publish the outbox. It has 64 shards, each of which belongs to one"
    " relay at a time; a key is always in the same shard.",
    "Partitions": "Partitions of the topics that the service reads. Each is read in order, by one"
    " process.",
    "Attempts": "Failed calls of the handler. Outages of PostgreSQL and Kafka are not counted.",
    "Redrive": "Retry, in the order of the key, with attempts counted from zero. A message that"
    " was applied in the meantime is recognised as a duplicate.",
    "Discard": "Give up: the message is not applied, and messages that wait for it are. Its row"
    " stays for a time, so that the message is recognised if it is received again.",
    "Held": "A partition of the outbox or the inbox that is old enough to be dropped, but still"
    " needed.",
    "Key": "The key of the record in Kafka. Messages of one key are applied in order; one that"
    " fails delays only its own key.",
    "Consumer": "The name of a handler. The inbox stores the messages that it has applied under"
    " this name.",
}
"""Each word with its explanation; among them every heading of the overview."""
