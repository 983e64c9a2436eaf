"""SQL that counts the backlog, for metrics and commands.

Parameters are described where a statement is executed. `backlog_count` has one row: one process at
a time counts, for all.
"""

TAKE_TURN_TO_COUNT = """
UPDATE pipeline.backlog_count SET counted_at = clock_timestamp()
 WHERE counted_at NOT BETWEEN clock_timestamp() - make_interval(secs => 0.8 * $1::float)
                          AND clock_timestamp()
RETURNING true
"""
"""Let one process count the backlog at a time.

Rather too early than half of the time too late: the clocks of processes are not in step. A count
from the future, as after a jump of the clock, is none.

Locks: the only row of `backlog_count`, until the statement ends. A process that has waited for
another's update finds that it is not its turn.
Plan: a scan of one row.
"""

COUNT_BACKLOG = """
WITH RECURSIVE of_lane AS MATERIALIZED (
    SELECT lane, lane >= $2 AS has_calls,
           max(GREATEST(lease_until, released_at)) OVER (PARTITION BY lane >= $2)
           > clock_timestamp() - $3::interval AS is_served
      FROM pipeline.backlog_lane
), part AS (
    SELECT of_lane.*, (SELECT consumer FROM pipeline.backlog b
                        WHERE b.lane = of_lane.lane AND due_at IS NOT NULL
                        ORDER BY consumer LIMIT 1) AS consumer
      FROM of_lane
    UNION ALL
    SELECT lane, has_calls, is_served,
           (SELECT b.consumer FROM pipeline.backlog b
             WHERE b.lane = part.lane AND b.consumer > part.consumer AND due_at IS NOT NULL
             ORDER BY b.consumer LIMIT 1)
      FROM part WHERE consumer IS NOT NULL
), due AS (
    SELECT part.consumer, has_calls, topic, count(*) AS waiting, min(received_at) AS first_at,
           min(due_at) FILTER (WHERE NOT is_served) AS unserved_since
      FROM part CROSS JOIN LATERAL (
           SELECT topic, received_at, due_at FROM pipeline.backlog b
            WHERE b.lane = part.lane AND b.consumer = part.consumer AND due_at IS NOT NULL
            ORDER BY due_at LIMIT $4) AS first
     GROUP BY part.consumer, has_calls, topic
), few AS (
    (SELECT b.* FROM generate_series(0, 255) AS slice CROSS JOIN LATERAL (
            SELECT consumer, lane, topic, received_at, attempts, false AS is_dead
              FROM pipeline.backlog
             WHERE died_at IS NULL
               AND order_key >= CASE slice WHEN 0 THEN '' ELSE set_byte('\\x00', 0, slice) END
               AND order_key <= set_byte(decode(repeat('ff', 64), 'hex'), 0, slice)
             ORDER BY order_key LIMIT $1) AS b
      LIMIT $1)
    UNION ALL
    (SELECT d.* FROM of_lane CROSS JOIN LATERAL (
            SELECT consumer, lane, topic, received_at, attempts, true AS is_dead
              FROM pipeline.backlog b
             WHERE b.lane = of_lane.lane AND died_at IS NOT NULL AND discarded_at IS NULL
             ORDER BY order_key LIMIT $1) AS d
      LIMIT $1)
), counted AS (
    SELECT consumer, lane >= $2 AS has_calls, topic,
           count(*) FILTER (WHERE NOT is_dead) AS waiting,
           count(*) FILTER (WHERE is_dead) AS dead,
           count(*) FILTER (WHERE NOT is_dead AND attempts > 0) AS failing,
           min(received_at) FILTER (WHERE NOT is_dead) AS first_at
      FROM few GROUP BY consumer, lane >= $2, topic
), by_topic AS (
    SELECT consumer, has_calls, topic, GREATEST(counted.waiting, due.waiting) AS waiting,
           COALESCE(dead, 0) AS dead, COALESCE(failing, 0) AS failing,
           GREATEST(extract(epoch FROM clock_timestamp()
                            - LEAST(counted.first_at, due.first_at)), 0)::float AS oldest,
           GREATEST(extract(epoch FROM clock_timestamp() - unserved_since), 0)::float AS unserved
      FROM counted FULL JOIN due USING (consumer, has_calls, topic)
)
SELECT consumer, has_calls, sum(waiting)::bigint, sum(dead)::bigint, sum(failing)::bigint,
       max(oldest), max(unserved), array_agg(topic), array_agg(oldest)
  FROM by_topic GROUP BY consumer, has_calls
"""
"""Count what waits and what is dead, for each consumer, and return its topics and their ages.

Reads so many rows that wait, so many dead ones, and the first rows of each lane and consumer that
are or become due, however many others there are. Each is looked up by a range of an index: with
ORDER BY alone the planner, if its statistics are old, could sort the whole table. The lanes of
calls have workers of their own: one that holds or has just released a lane serves all.

Locks: none.
Plan: `backlog_due_idx` for the first `$4` that are due of each lane and consumer,
`backlog_order_idx` for `$1` that wait, `backlog_dead_idx` for `$1` that are dead; each with its
row. The client's time limit is a minute.
"""

STORE_COUNT = "UPDATE pipeline.backlog_count SET counts = $1::text::json"
"""Store the latest count, for all processes.

Locks: the only row of `backlog_count`.
Plan: a scan of one row.
"""

READ_COUNT = "SELECT counts::text FROM pipeline.backlog_count"
"""Return the latest count.

Locks: none.
Plan: a scan of one row.
"""
