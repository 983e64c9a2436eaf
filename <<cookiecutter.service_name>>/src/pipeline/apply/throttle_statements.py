"""SQL by which processes obey what people pause and throttle.

Parameters are described where a statement is executed. What people do is in the statements of the
room `operators`.
"""

PAUSES = "(paused)"
"""Stands for the topic of rows for which a key waits; no topic has such a name."""
LATE_SECONDS = 1.0
"""What was not taken for so long may be taken later, so that a loop that looks now and then reaches
the rate."""
_KEYS = 1_000
"""Paused keys that are looked at: they are only told, as no loop needs to know of them."""

READ_STOPS = f"""
SELECT kind, CASE kind WHEN 'key' THEN topic ELSE subject END AS name,
       min(per_second) AS per_second,
       COALESCE(max(extract(epoch FROM next_at - clock_timestamp())), -{LATE_SECONDS})::float
           AS rests,
       max(extract(epoch FROM clock_timestamp() - since)) FILTER (WHERE until IS NULL)::float
           AS age
  FROM (SELECT * FROM pipeline.throttle WHERE kind IN ('topic', 'consumer', 'events')
         UNION ALL
        (SELECT * FROM pipeline.throttle WHERE kind = 'key' LIMIT {_KEYS})) AS asked
 WHERE until IS NULL OR until > clock_timestamp()
 GROUP BY 1, 2
"""
"""Return the rate of each topic, consumer and destination of events, and for how long it rests.

Each process asks once a second.

Locks: none.
Plan: `throttle_pkey` by its first column, or a scan of `throttle`; keys are read up to a limit.
"""

NOTE_TAKEN = f"""
UPDATE pipeline.throttle
   SET next_at = GREATEST(next_at, clock_timestamp() - interval '{LATE_SECONDS} s')
                 + make_interval(secs => $3::float / per_second)
 WHERE kind = $1 AND subject = $2 AND per_second > 0
RETURNING extract(epoch FROM next_at - clock_timestamp())::float
"""
"""Note how many were taken of what is throttled; returns for how many seconds it rests.

Locks: its row, which all processes that take of it update.
Plan: `throttle_pkey` by its first two columns, or a scan of `throttle`.
"""
