/*
 * The backlog: parking in the consume transaction, the workers of lanes, and operators' commands on
 * dead letters and keys.
 *
 * Two processes consume two partitions, as in consume.pml. Two workers compete for the lane that
 * all keys belong to. Each process may pause for any time between two steps, also beyond its lease.
 * A record may be undecodable, a handler may fail at every call, and commands redrive and discard
 * dead letters, and pause the key of the first record.
 *
 * The rows of the backlog are sets of records. A statement reads what is committed at its start;
 * a transaction's writes become visible at its commit. The due time of a row may come at any
 * moment; a row without a due time needs one from another transaction.
 *
 * -D<fault> builds in a fault; check.py lists them.
 */

#include "common.pml"

#ifndef FAILURES
#define FAILURES   1  /* undecodable records, handlers that fail permanently */
#endif
#ifndef MISHAPS
#define MISHAPS    1  /* broken connections, dead processes, expired leases */
#endif
#ifndef DECISIONS
#define DECISIONS  1  /* commands on dead letters */
#endif
#ifndef SEEKS
#define SEEKS      0  /* times a command moves a partition to its start */
#endif
#ifndef PAUSES
#define PAUSES     0  /* times a command pauses a key, or prolongs that */
#endif
#ifndef BATCH
#define BATCH      2  /* most records */
#endif
#ifndef RUN
#define RUN        2  /* most rows of a lane in one transaction */
#endif
#ifndef ASIDE
#define ASIDE      0  /* the set of the first partition's records that have another key */
#endif
#ifndef LAST_EVENT
#define LAST_EVENT 2  /* of the first partition; 0 is the event of its first record, again */
#endif
#define CONSUMERS  2
#define PARTITIONS 2
#define EVENTS     3
#define LENGTH     3  /* of the first partition; the second one has one record, with event 0 */
#define RECORDS    (LENGTH + 1)

/* Records are numbered through both partitions. A key is the set of its records. */
#define start_of(partition)  ((partition) * LENGTH)
#define end_of(partition)    (LENGTH + (partition))
#define partition_of(record) ((record) / LENGTH)
#define event_of(record)     ((record) < 2 -> (record) : ((record) == 2 -> LAST_EVENT : 0))
#define key_of(record)       ((record) == LENGTH -> only(LENGTH) : \
                              (has(ASIDE, record) -> ASIDE : below(LENGTH) & ~ASIDE))

/* ---- The state of PostgreSQL ---- */

#define NOBODY    255
#define ABSENT    254
#define COMMITTED 253  /* visible to all; other values: the process that has inserted it */

byte position[PARTITIONS];                    /* pipeline.position: the next record */
byte position_locked_by[PARTITIONS] = NOBODY;
byte markers[EVENTS] = ABSENT;                /* pipeline.inbox */

byte waiting, dead, holding;                  /* pipeline.backlog; a holding row is dead, and its
                                                 key waits */
byte due, come;                               /* rows with a due time; rows whose time has come */

bool has_pause, is_pause_due;                 /* the row of a pause, at the head of its key */
bool is_pause_locked;                         /* a worker that ends it has deleted it */

byte lane_token = NOBODY;                     /* pipeline.lane: the worker that raised it last */
byte lane_locked_by = NOBODY;
bool is_lease_over;

#define rows              (waiting | dead | holding)
#define blocking          (waiting | holding)
#define first(records)    ((records) & -(records))
#define is_decided(event) (markers[event] == ABSENT || markers[event] == COMMITTED)
#define is_all_read       (position[0] == end_of(0) && position[1] == end_of(1))
#define may_run(record)   (first(blocking & key_of(record)) & waiting)
#define pause_is_head_of(key) (has_pause && (key) == key_of(0))
#define is_worked_off     (!has_pause && !may_run(0) && !may_run(1) && !may_run(2) && !may_run(3))

/* ---- State that only the promises read ---- */

byte handled;                                 /* records whose handlers had an effect */
byte released;                                /* records that were dead without holding their key */
byte applied, discarded;                      /* events */

byte failures = FAILURES, mishaps = MISHAPS, decisions = DECISIONS, seeks = SEEKS, pauses = PAUSES;
bool has_begun;
byte ended;

byte i, j, places;                            /* scratch, within one step */

/* ---- Faults, and the definitions without them ---- */

#ifdef LOOK_UP_BEFORE_MARKERS
#define looked_up_waiting waiting_then
#define looked_up_dead    dead_then
#define looked_up_holding holding_then
#else
#define looked_up_waiting waiting
#define looked_up_dead    dead
#define looked_up_holding holding
#endif

#define has_row(records, record) \
    (has(records, 0) && event_of(0) == event_of(record) || \
     has(records, 1) && event_of(1) == event_of(record) || \
     has(records, 2) && event_of(2) == event_of(record) || \
     has(records, 3) && event_of(3) == event_of(record))

#if defined(NO_LOOK_UP_OF_EVENTS)
#define has_row_of_event false
#elif defined(NO_LOOK_UP_OF_DEAD_EVENTS)
#define has_row_of_event has_row(looked_up_waiting, i)
#else
#define has_row_of_event has_row((looked_up_waiting | looked_up_dead | looked_up_holding), i)
#endif

#if defined(NO_LOOK_UP_OF_KEYS)
#define is_behind false
#elif defined(NO_LOOK_UP_OF_HOLDING_KEYS)
#define is_behind (looked_up_waiting & key_of(i))
#else
#define is_behind ((looked_up_waiting | looked_up_holding) & key_of(i))
#endif

#ifdef PARKED_WITHOUT_MARKER
#define is_marked_first (birth == FOLLOWER)
#else
#define is_marked_first true
#endif

#ifdef PARKED_KEEPS_ITS_MARKER
#define marker_of_parked COMMITTED
#else
#define marker_of_parked ABSENT
#endif

#ifdef DUPLICATE_KEEPS_ITS_MARKER
#define marker_of_known COMMITTED
#else
#define marker_of_known ABSENT
#endif

/* Rows parked in one transaction become visible together: only the first of a key must be due. */
#ifdef FOLLOWER_BORN_NOT_DUE
#define born_due 0
#else
#define born_due (first(park & ASIDE) | first(park & below(LENGTH) & ~ASIDE) | park & only(LENGTH))
#endif

#ifdef NO_LOOK_UP_OF_PAUSES
#define is_paused false
#else
#define is_paused pause_is_head_of(key_of(i))
#endif

#ifdef HEADS_AS_READ
#define is_overtaken false
#else
#define is_overtaken pause_is_head_of(key)
#endif

#ifdef PROLONGED_PAUSE_ENDS
#define is_still_due true
#else
#define is_still_due is_pause_due
#endif

#ifdef PAUSE_ENDS_ALONE
#define stays_behind pause_is_head_of(key)
#else
#define stays_behind (pause_is_head_of(key) && !ends)
#endif

#ifdef RUN_FROM_THE_DUE_ROW
#define the_head found
#else
#define the_head first(blocking & key)
#endif

#ifdef RUN_PAST_A_HOLDING_ROW
#define the_second first(waiting & key & ~(head | (head - 1)))
#else
#define the_second first(blocking & key & ~(head | (head - 1)))
#endif

#ifdef NEXT_ROW_AS_READ
#define next_row (read & ~taken)
#else
#define next_row (blocking & key & ~taken)
#endif

#ifdef ROWS_AS_READ
#define is_as_read true
#else
#define is_as_read (first(taken) == first(blocking & key) && (first(taken) & waiting & come))
#endif

#ifdef SETTLED_WITHOUT_MARKER
#define marker_of_settled ABSENT
#else
#define marker_of_settled COMMITTED
#endif

#ifdef DISCARDED_WITHOUT_MARKER
#define marker_of_discarded ABSENT
#else
#define marker_of_discarded COMMITTED
#endif

#ifdef NO_LANE_TOKEN
#define is_owner true
#else
#define is_owner (lane_token == me)
#endif

#ifdef NO_LANE_LOCK
#define lane_lock NOBODY
#else
#define lane_lock me
#endif

#ifdef DECISION_WITHOUT_LANE_LOCK
#define may_decide true
#define persons_lock lane_locked_by
#else
#define may_decide can_lock_lane
#define persons_lock me
#endif

/* ---- Consumers and workers ---- */

/* An event is in at most one place, and in one once one of its records is passed; the first row of
   a key is due, or is dead and holds the key. */
inline check()
{
    for (i : 0 .. RECORDS - 1) {
        places = has(applied, event_of(i)) + has(discarded, event_of(i));
        for (j : 0 .. RECORDS - 1) {
            if
            :: event_of(j) == event_of(i) -> places = places + has(rows, j)
            :: else
            fi
        }
        promise(NO_DOUBLE, places < 2);
        promise(NO_LOSS, places > 0 || i >= position[partition_of(i)]);
        promise(NO_ORPHAN, pause_is_head_of(key_of(i))
                           || !(first(blocking & key_of(i)) & waiting & ~due))
    }
    i = 0; j = 0; places = 0
}

/* The handlers' changes become visible, in the order of the key, except for a dead letter that
   does not hold it. */
inline take_effect(record)
{
    promise(NO_DOUBLE, !has(applied, event_of(record)));
    promise(IN_ORDER, !(blocking & key_of(record) & below(record) & ~taken & ~released));
    promise(IN_ORDER, !(handled & key_of(record) & ~below(record)) || has(released, record));
    applied = with(applied, event_of(record));
    handled = with(handled, record)
}

/* _MARK, one of its rows: sorted by key, ON CONFLICT DO NOTHING RETURNING. It waits for an
   uncommitted insert of the same key. */
#define next_event (has(to_mark, 0) -> 0 : (has(to_mark, 1) -> 1 : 2))

inline mark()
{
    i = next_event;
    to_mark = without(to_mark, i);
    if
    :: markers[i] == COMMITTED
    :: else ->
        markers[i] = me;
        new = with(new, i);
        printf("%d marks event %d\n", me, i)
    fi;
    i = 0
}

inline unmark()
{
    for (i : 0 .. EVENTS - 1) {
        if
        :: markers[i] == me -> markers[i] = ABSENT
        :: else
        fi
    }
    i = 0; to_mark = 0; new = 0
}

mtype = { LOST, FETCHED, MARKING, READY, IDLE, LEASED, READ, DONE, AGAIN }
mtype = { FOLLOWER, WAITING, DEAD, HOLDING }

/* ---- Consuming ---- */

inline fetch()
{
    if
    :: position[0] < end_of(0) -> from = position[0]
    :: position[1] < end_of(1) -> from = position[1]
    fi;
    if
    :: end = from + 1
    :: BATCH == 2 && from + 2 <= end_of(partition_of(from)) -> end = from + 2
    :: failures > 0 -> printf("record %d is at fault\n", from); give_up()
    fi;
    printf("consumer %d fetches %d to %d\n", me, from, end - 1);
    has_begun = true;
    at = FETCHED
}

/* The first record of the batch has failed: it becomes a batch of its own, to be parked. */
inline give_up()
{
    failures--;
    end = from + 1;
    if
    :: birth = WAITING
    :: birth = DEAD
    :: birth = HOLDING
    fi
}

inline forget_batch() { from = 0; end = 0; birth = FOLLOWER; at = LOST }

/* MOVE_POSITIONS: waits for the row, then compares and sets. */
inline move_position()
{
    position_locked_by[partition_of(from)] = me;
    if
    :: is_marked_first ->
        for (i : from .. end - 1) { to_mark = with(to_mark, event_of(i)) }
    :: else
    fi;
#ifdef LOOK_UP_BEFORE_MARKERS
    waiting_then = waiting; dead_then = dead; holding_then = holding;
#endif
    i = 0;
    at = MARKING
}

/* Identities and order keys, in a statement after the one that waited for the markers. */
inline look_up()
{
    for (i : from .. end - 1) {
        if
        :: is_marked_first && !has(new, event_of(i)) ->
            printf("consumer %d: record %d is a duplicate\n", me, i)
        :: else ->
            new = without(new, event_of(i));
            if
            :: has_row_of_event -> printf("consumer %d: record %d is parked already\n", me, i)
            :: !has_row_of_event && birth == FOLLOWER && !is_behind && !is_paused ->
                promise(PAUSED, !pause_is_head_of(key_of(i)));
                printf("consumer %d runs record %d\n", me, i);
                taken = with(taken, i)
            :: else ->
                printf("consumer %d parks record %d\n", me, i);
                park = with(park, i)
            fi
        fi
    }
    i = 0;
    at = READY
}

/* The markers of messages that are parked, or found in the backlog, are deleted. */
inline commit_batch()
{
    for (i : from .. end - 1) {
        if
        :: has(taken, i) ->
            printf("record %d takes effect\n", i);
            take_effect(i);
            markers[event_of(i)] = COMMITTED
        :: has(park, i) && markers[event_of(i)] == me -> markers[event_of(i)] = marker_of_parked
        :: else
        fi
    }
    for (i : 0 .. EVENTS - 1) {
        if
        :: markers[i] == me -> markers[i] = marker_of_known
        :: else
        fi
    }
    if
    :: birth == DEAD -> dead = dead | park; released = released | park
    :: birth == HOLDING -> holding = holding | park
    :: birth == WAITING -> waiting = waiting | park; due = due | park
    :: else -> waiting = waiting | park; due = due | born_due; come = come | born_due
    fi;
    promise(FENCED, position[partition_of(from)] == from);
    position[partition_of(from)] = end;
    printf("consumer %d commits, the next record is %d\n", me, end);
    check()
}

inline end_of_batch()
{
    unmark();
    if
    :: position_locked_by[partition_of(from)] == me ->
        position_locked_by[partition_of(from)] = NOBODY
    :: else
    fi;
    taken = 0; park = 0;
#ifdef LOOK_UP_BEFORE_MARKERS
    waiting_then = 0; dead_then = 0; holding_then = 0
#endif
}

#define can_lock_position (position_locked_by[partition_of(from)] == NOBODY)
#define is_where_we_think (position[partition_of(from)] == from)

proctype Consumer(byte me)
{
    mtype at = LOST;
    byte from, end;           /* the batch */
    mtype birth = FOLLOWER;   /* the state of its record if that has failed */
    byte to_mark, new;        /* events */
    byte taken, park;           /* records */
#ifdef LOOK_UP_BEFORE_MARKERS
    byte waiting_then, dead_then, holding_then;
#endif

    do
    :: atomic { at == LOST && !is_all_read -> fetch() }
    :: at == LOST && is_all_read && !seeks -> break
    :: d_step { at == FETCHED && can_lock_position && is_where_we_think -> move_position() }
    :: d_step {
           at == FETCHED && can_lock_position && !is_where_we_think ->
           printf("consumer %d: PositionMoved\n", me);
           forget_batch()
       }
    :: d_step { at == MARKING && to_mark && is_decided(next_event) -> mark() }
    :: d_step { at == MARKING && !to_mark -> look_up() }
    :: d_step { at == READY -> commit_batch(); end_of_batch(); forget_batch() }
    :: atomic {
           at == READY && has(taken, from) && failures > 0 ->
           printf("record %d fails\n", from);
           end_of_batch();
           give_up();
           at = FETCHED
       }
    :: atomic {
           at != LOST && mishaps > 0 ->
           mishaps--;
           printf("consumer %d is cut off\n", me);
           end_of_batch();
           if
           :: at = FETCHED    /* repeat the batch */
           :: forget_batch()  /* a new process */
           fi
       }
    od;
    ended++
}

/* ---- Workers of lanes ---- */

/* Lock the lane and read a due row's key: the rows from its first one on, up to one that holds. If
   a pause is its head, the transaction only ends that, and only when it is due. */
inline take_up()
{
    lane_locked_by = lane_lock;
    if
    :: is_pause_due -> key = key_of(0)
    :: has(waiting & due, 0) -> found = only(0); key = key_of(0)
    :: has(waiting & due, 1) -> found = only(1); key = key_of(1)
    :: has(waiting & due, 2) -> found = only(2); key = key_of(2)
    :: has(waiting & due, 3) -> found = only(3); key = key_of(3)
    fi;
    head = (pause_is_head_of(key) -> 0 : the_head);
    read = blocking & key;
    come = come | found;
    if
    :: pause_is_head_of(key) -> ends = is_pause_due
    :: head & waiting & due -> taken = head
    :: RUN == 2 && (head & waiting & due) && (the_second & waiting) -> taken = head | the_second
    :: !pause_is_head_of(key) && !(head & come)  /* the head holds, or its time has not come */
    fi;
    come = come | taken;
    printf("worker %d takes up %d of key %d\n", me, taken, key);
    found = 0;
    at = READ
}

/* Due rows of the key that cannot run yet wait for the row before them. */
inline demote()
{
    demoted = waiting & come & key & ~taken & ~head;
    for (i : 0 .. RECORDS - 1) {
        if
        :: has(taken, i) -> to_mark = with(to_mark, event_of(i))
        :: else
        fi
    }
    i = 0;
    at = (taken || ends -> MARKING : DONE)
}

/* The same rows once more, if they are as they were read: what was decided has no marker. */
inline repeat()
{
    lane_locked_by = lane_lock;
    read = blocking & key;
    if
    :: is_as_read ->
        head = first(taken);
        demote()
    :: else ->
        printf("worker %d leaves %d alone\n", me, taken);
        end_of_run();
        forget_failure();
        at = LEASED
    fi
}

/* Look at the head again: whether the key is paused meanwhile, or its pause prolonged. */
inline compare_head()
{
    if
    :: ends && is_still_due -> is_pause_locked = true
    :: ends && !is_still_due -> ends = false
    :: !ends && is_overtaken -> taken = 0
    :: else
    fi;
    promise(PAUSED, !(taken && pause_is_head_of(key)))
}

/* The next row of the key is due. */
inline promote()
{
    promoted = (stays_behind -> 0 : first(next_row) & waiting);
    at = DONE
}

/* The failed row is due later, or dead. If its key is released, the next row is due. */
inline bury()
{
    lane_locked_by = lane_lock;
    taken = failed;
    read = blocking & key;
    if
    :: death == DEAD -> promote()
    :: else -> at = DONE
    fi
}

inline commit_run()
{
    promise(FENCED, lane_token == me);
    for (i : 0 .. RECORDS - 1) {
        if
        :: has(new, event_of(i)) && has(taken, i) ->
            printf("record %d takes effect\n", i);
            take_effect(i);
            markers[event_of(i)] = marker_of_settled
        :: else
        fi
    }
    if
    :: death == DEAD -> dead = dead | failed & rows; released = released | failed
    :: death == HOLDING -> holding = holding | failed & rows
    :: else
    fi;
    if
    :: ends ->
        promise(PAUSED, is_pause_due);
        printf("the pause ends\n");
        has_pause = false; is_pause_due = false
    :: else
    fi;
    waiting = waiting & ~(failed && death == WAITING -> 0 : taken);
    come = (come & ~demoted & ~failed | promoted) & waiting;
    due = (due & ~demoted | promoted) & waiting;
    printf("worker %d commits: waiting %d, due %d\n", me, waiting, due);
    check()
}

inline end_of_run()
{
    unmark();
    if
    :: lane_locked_by == me -> lane_locked_by = NOBODY
    :: else
    fi;
    if
    :: ends -> ends = false; is_pause_locked = false
    :: else
    fi;
    head = 0; taken = 0; read = 0; demoted = 0; promoted = 0
}

inline forget_failure() { failed = 0; key = 0; death = WAITING }

#define can_lock_lane (lane_locked_by == NOBODY)
#define is_at_rest    (at == LEASED || (at == IDLE && lane_token != NOBODY))

proctype Worker(byte me)
{
    mtype at = IDLE;
    byte found, key, head, read;  /* rows: a due one, its key, its first row, all its rows */
    byte taken, demoted, promoted;  /* to settle; to lose, or to get, a due time */
    byte to_mark, new;            /* events */
    byte failed;                  /* a row */
    mtype death = WAITING;        /* and its next state */
    bool ends;                    /* a pause */

    do
    :: d_step {
           at == IDLE && can_lock_lane && (lane_token == NOBODY || is_lease_over) ->
           printf("worker %d claims the lane\n", me);
           lane_token = me;
           is_lease_over = false;
           at = LEASED
       }
    :: d_step {
           at == LEASED && can_lock_lane && !is_owner ->
           printf("worker %d has lost the lane\n", me);
           forget_failure();
           at = IDLE
       }
    :: atomic {
           at == LEASED && can_lock_lane && is_owner && !failed &&
           (waiting & due || is_pause_due) ->
           take_up()
       }
    :: d_step { at == LEASED && can_lock_lane && is_owner && failed -> bury() }
    :: d_step { at == READ -> demote() }
    :: d_step { at == MARKING && to_mark && is_decided(next_event) -> mark() }
    :: d_step { at == MARKING && !to_mark -> compare_head(); promote() }
    :: atomic {
           at == MARKING && !to_mark && failures > 0 && (taken == head) && new &&
           !pause_is_head_of(key) ->
           failures--;
           printf("row %d fails\n", head);
           failed = head;
           end_of_run();
           if
           :: death = WAITING
           :: death = DEAD
           :: death = HOLDING
           fi;
           at = LEASED
       }
    :: d_step {
           at == DONE ->
           commit_run();
           end_of_run();
           forget_failure();
           at = LEASED
       }
    :: d_step {
           at == DONE && mishaps > 0 ->
           mishaps--;
           printf("worker %d gets no answer to its commit\n", me);
           commit_run();
           found = taken;
           end_of_run();
           taken = found;
           found = 0; failed = 0; death = WAITING;
           at = AGAIN
       }
    :: d_step { at == AGAIN && can_lock_lane && is_owner -> repeat() }
    :: d_step {
           at == AGAIN && can_lock_lane && !is_owner ->
           printf("worker %d has lost the lane\n", me);
           taken = 0;
           forget_failure();
           at = IDLE
       }
    :: atomic {
           at != IDLE && mishaps > 0 ->
           mishaps--;
           if
           :: at != LEASED && at != AGAIN ->
               printf("worker %d is cut off\n", me);
               end_of_run();
               at = LEASED
           :: printf("worker %d is killed\n", me);
              end_of_run();
              forget_failure();
              is_lease_over = is_lease_over || lane_token == me;
              at = IDLE
           :: lane_token == me && !is_lease_over ->
              printf("the lease of worker %d ends\n", me);
              is_lease_over = true
           fi
       }
    :: is_at_rest && !failed && ended > CONSUMERS && is_worked_off -> break
    od;
    ended++
}

/* ---- Operators' commands ---- */

inline decide(record)
{
    which = record;
    lane_locked_by = persons_lock;
    decisions--;
    if
    :: printf("dead row %d is to be redriven\n", record); at = DONE
    :: printf("dead row %d is to be discarded\n", record); at = MARKING
    fi
}

/* `service dead redrive`, `service dead discard`, `service topics seek` to the start, and `service
   pause key`. `service resume` makes the pause due; so does the end of its time. */
proctype Person(byte me)
{
    mtype at = IDLE;
    byte which, promoted;
    bool is_discarded;

    do
    :: atomic { at == IDLE && decisions > 0 && may_decide && has(dead | holding, 0) -> decide(0) }
    :: atomic { at == IDLE && decisions > 0 && may_decide && has(dead | holding, 1) -> decide(1) }
    :: atomic { at == IDLE && decisions > 0 && may_decide && has(dead | holding, 2) -> decide(2) }
    :: atomic { at == IDLE && decisions > 0 && may_decide && has(dead | holding, 3) -> decide(3) }
    :: d_step {
           at == MARKING && is_decided(event_of(which)) ->
           /* The next row of a held key becomes due. */
           promoted = (has(holding, which)
                       -> first(blocking & key_of(which) & ~only(which)) & waiting : 0);
           markers[event_of(which)] = (markers[event_of(which)] == ABSENT -> me : COMMITTED);
           is_discarded = true;
           at = DONE
       }
    :: d_step {
           at == DONE ->
           if
           :: is_discarded ->
               discarded = with(discarded, event_of(which));
               if
               :: markers[event_of(which)] == me -> markers[event_of(which)] = marker_of_discarded
               :: else
               fi
           :: else -> waiting = with(waiting, which); promoted = only(which)
           fi;
           dead = without(dead, which);
           holding = without(holding, which);
           due = due | promoted & waiting;
           come = come | promoted & waiting;
           printf("so it is: waiting %d, due %d\n", waiting, due);
           check();
           if
           :: lane_locked_by == me -> lane_locked_by = NOBODY
           :: else
           fi;
           which = 0; promoted = 0; is_discarded = false;
           at = IDLE
       }
    :: d_step {
           at == IDLE && seeks > 0 && position_locked_by[0] == NOBODY ->
           seeks--;
           position[0] = start_of(0);
           printf("partition 0 is sent back\n")
       }
    :: d_step {
           at == IDLE && pauses > 0 && !is_pause_locked ->
           pauses--;
           has_pause = true; is_pause_due = false;
           printf("key %d is paused\n", key_of(0))
       }
    :: d_step {
           at == IDLE && has_pause && !is_pause_due ->
           is_pause_due = true;
           printf("the pause is over\n")
       }
    :: at == IDLE && (!has_pause || is_pause_due) -> seeks = 0; pauses = 0; break
    od;
    ended++
}

/* Consumers are symmetric, and so are workers: the first is the one that begins first. */
init
{
    atomic {
        position[1] = start_of(1);
        run Consumer(0); run Worker(2); run Person(4)
    };
    has_begun -> run Consumer(1);
    lane_token != NOBODY -> run Worker(3);
    d_step { ended == CONSUMERS + 3 -> check() }
}
