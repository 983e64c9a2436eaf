/*
 * The consume transaction: a model of the engine's rooms consume/ and apply/.
 *
 * Two processes consume two partitions. Partitions are not assigned: each process may read either
 * partition at any time, and may pause for any time between two steps. So a process may be the
 * owner or a zombie, and no promise depends on a group coordinator.
 *
 * Each option of Consumer's loop is one atomic action of PostgreSQL: grant a lock, take a snapshot,
 * write rows, commit. The connection may break before any of them. The server then rolls back, and
 * the process repeats the batch, or it is dead and a new process reads the position. The answer to
 * COMMIT is a separate step, so that it may be lost.
 *
 * -D<fault> builds in a fault; check.py lists them.
 */

#include "common.pml"

#ifndef LENGTH
#define LENGTH      3  /* records in a partition */
#endif
#ifndef BATCH
#define BATCH       2  /* records, at most */
#endif
#ifndef GENERATIONS
#define GENERATIONS 2  /* of the inbox; it is rotated GENERATIONS - 1 times */
#endif
#ifndef MISHAPS
#define MISHAPS     1  /* broken connections and dead processes */
#endif
#ifndef TOGETHER
#define TOGETHER    1  /* partitions that share a transaction, at most */
#endif
#define CONSUMERS   2
#define PARTITIONS  2
#define EVENTS      2

/* One partition holds the events 0 1 0, the other 1 0 1: each is sent three times. */
#define event_at(partition, offset) ((partition + offset) % EVENTS)

/* ---- The state of PostgreSQL ---- */

#define NOBODY    255
#define ABSENT    254
#define COMMITTED 253  /* visible to all; other values: the process that has inserted it */

byte position[PARTITIONS];                    /* pipeline.position, next_offset */
byte position_locked_by[PARTITIONS] = NOBODY;
byte current, oldest;                         /* pipeline.inbox_generation */
byte markers[GENERATIONS * EVENTS] = ABSENT;  /* pipeline.inbox */
byte sharing;                                 /* transactions with GENERATION_LOCK shared */

#define marker(generation, event) markers[(generation) * EVENTS + (event)]
#define is_all_read               (position[0] == LENGTH && position[1] == LENGTH)

/* ---- State that only the promises read ---- */

#define NEVER 255

byte applied_in[EVENTS] = NEVER;              /* the generation that remembers the effect */
byte handled[PARTITIONS];                     /* the offsets whose handlers had an effect */

byte mishaps = MISHAPS;
byte ended;

/* ---- Faults, and the definitions without them ---- */

#if defined(POSITION_FIRST) || defined(NO_COMPARE_AND_SET)
#define is_where_we_think true
#else
#define is_where_we_think (position[next_partition] == from[next_partition])
#endif

#ifdef POSITIONS_UNSORTED
#define next_partition (me == 1 && has(to_move, 1) || !has(to_move, 0))
#else
#define next_partition (!has(to_move, 0))
#endif

#ifdef MARKER_IN_ITS_OWN_TRANSACTION
#define inserted COMMITTED
#else
#define inserted me
#endif

#ifdef MARKERS_UNSORTED
#define first_key event_at(!has(parts, 0), from[!has(parts, 0)])
#else
#define first_key 0
#endif

#ifdef MARKERS_WITHOUT_UNIQUE_KEY
#define is_decided(marker) true
#else
#define is_decided(marker) (marker == ABSENT || marker == COMMITTED)
#endif

#ifdef ROTATION_WITHOUT_LOCK
#define may_rotate true
#else
#define may_rotate (sharing == 0)
#endif

/*
 * generations.close_generation: _LOCK_GENERATION, _CLOSE_GENERATION and COMMIT. They are one step,
 * because every transaction that reads the row waits for the lock. `oldest` is raised in the same
 * way, before a generation is dropped.
 */
active proctype Retention()
{
    byte event;

    do
    :: d_step {
           current < GENERATIONS - 1 && may_rotate ->
           current++;
           printf("generation %d is closed\n", current - 1)
       }
    :: d_step {
           oldest < current && may_rotate ->
           for (event : 0 .. EVENTS - 1) { marker(oldest, event) = ABSENT }
           event = 0;
           oldest++;
           printf("generation %d is forgotten\n", oldest - 1)
       }
    :: break
    od
}

/* PartitionPosition.locate: read the position of a partition, or those of two that become ready
   together. */
inline locate()
{
    if
    :: position[0] < LENGTH -> parts = only(0)
    :: position[1] < LENGTH -> parts = only(1)
    :: TOGETHER > 1 && position[0] < LENGTH && position[1] < LENGTH -> parts = with(only(0), 1)
    fi;
    for (p : 0 .. PARTITIONS - 1) {
        if
        :: has(parts, p) ->
            from[p] = position[p];
            printf("consumer %d reads that partition %d goes on at %d\n", me, p, from[p])
        :: else
        fi
    }
    p = 0;
    at = LOCATED
}

/* Reader._fetch: the broker returns the records from that position on. */
inline fetch()
{
    for (p : 0 .. PARTITIONS - 1) {
        if
        :: has(parts, p) ->
            if
            :: end[p] = from[p] + 1
            :: from[p] + BATCH <= LENGTH -> end[p] = from[p] + BATCH
            fi;
            printf("consumer %d fetches %d to %d of partition %d\n", me, from[p], end[p] - 1, p)
        :: else
        fi
    }
    p = 0;
    at = FETCHED;
#ifdef POSITION_FIRST
    p = !has(parts, 0);
    if
    :: position[p] == from[p] -> position[p] = end[p]; p = 0
    :: else -> forget_batch()
    fi
#endif
}

inline forget_batch()
{
    from[0] = 0; from[1] = 0; end[0] = 0; end[1] = 0; parts = 0; p = 0;
    at = LOST
}

/* Gatherer._start, its `end`: what was not applied together is applied by itself. */
inline part()
{
    if
    :: parts == with(only(0), 1) ->
        if
        :: parts = only(0); from[1] = 0; end[1] = 0
        :: parts = only(1); from[0] = 0; end[0] = 0
        fi
    :: else
    fi
}

/* The shared lock, alone in its statement: waits during a rotation. */
inline begin()
{
    sharing++; is_open = true; to_move = parts; at = BEGUN;
    printf("consumer %d begins\n", me)
}

inline read_generations() { generation = current; remembered = oldest }

/* _FIND_IN_CLOSED_GENERATIONS: in one snapshot, without a lock. */
inline look_up()
{
    for (p : 0 .. PARTITIONS - 1) {
        for (i : from[p] .. end[p] - 1) { to_mark = with(to_mark, event_at(p, i)) }
    }
    p = 0;
#ifndef NO_LOOK_UP
    for (i : remembered * EVENTS .. generation * EVENTS - 1) {
        if
        :: markers[i] == COMMITTED -> to_mark = without(to_mark, i % EVENTS)
        :: else
        fi
    }
#endif
}

/* _MARK, one of its rows: sorted by key, ON CONFLICT DO NOTHING RETURNING. It waits for an
   uncommitted insert of the same key. */
#define next_key (has(to_mark, first_key) -> first_key : 1 - first_key)

inline mark()
{
    i = next_key;
    to_mark = without(to_mark, i);
    if
    :: marker(generation, i) == COMMITTED
    :: else ->
        marker(generation, i) = inserted;
        new = with(new, i);
        printf("consumer %d marks event %d in generation %d\n", me, i, generation)
    fi
}

/* The handlers' changes become visible, in the order of each partition. */
inline take_effect()
{
    for (p : 0 .. PARTITIONS - 1) {
        for (i : from[p] .. end[p] - 1) {
            if
            :: has(new, event_at(p, i)) ->
                new = without(new, event_at(p, i));  /* its first record in the batches */
                printf("consumer %d applies event %d\n", me, event_at(p, i));
                promise(NO_DOUBLE, !has(handled[p], i));
                promise(NO_DOUBLE, applied_in[event_at(p, i)] == NEVER
                                || applied_in[event_at(p, i)] < oldest);
                promise(IN_ORDER, handled[p] < only(i));
                applied_in[event_at(p, i)] = generation;
                handled[p] = with(handled[p], i)
            :: else
            fi
        }
    }
    p = 0
}

inline commit()
{
    take_effect();
    for (i : 0 .. GENERATIONS * EVENTS - 1) {
        if
        :: markers[i] == me -> markers[i] = COMMITTED
        :: else
        fi
    }
    for (p : 0 .. PARTITIONS - 1) {
        if
        :: has(parts, p) ->
#ifndef POSITION_FIRST
            promise(FENCED, position[p] == from[p]);
            position[p] = end[p];
#endif
            printf("consumer %d commits, partition %d goes on at %d\n", me, p, position[p])
        :: else
        fi;
        for (i : 0 .. end[p] - 1) { promise(NO_LOSS, applied_in[event_at(p, i)] != NEVER) }
    }
    p = 0
}

/* Discard uncommitted writes and release the locks. */
inline end_transaction()
{
    for (i : 0 .. GENERATIONS * EVENTS - 1) {
        if
        :: markers[i] == me -> markers[i] = ABSENT
        :: else
        fi
    }
    for (p : 0 .. PARTITIONS - 1) {
        if
        :: position_locked_by[p] == me -> position_locked_by[p] = NOBODY
        :: else
        fi
    }
    p = 0;
    sharing = sharing - is_open;
    is_open = false;
    to_move = 0; to_mark = 0; new = 0; generation = 0; remembered = 0; i = 0
}

mtype = { LOST, LOCATED, FETCHED, QUEUED, BEGUN, MOVED, MARKING, COMMITTED_UNHEARD }

#define can_move (position_locked_by[next_partition] == NOBODY)
#define is_more  (end[0] < LENGTH && end[1] < LENGTH)  /* of each partition; 0 if it has no batch */

proctype Consumer(byte me)
{
    mtype at = LOST;
    byte parts;                               /* the partitions of the transaction */
    byte from[PARTITIONS], end[PARTITIONS];   /* the batch of each */
    byte generation, remembered;  /* current and oldest, as read by the transaction */
    byte to_move;                 /* partitions whose positions are to be locked */
    byte to_mark, new;            /* events to insert a marker for; events to apply */
    bool is_open;
    byte i, p;

    do
    :: atomic { at == LOST && !is_all_read -> locate() }
    :: at == LOST && is_all_read -> break
    :: atomic { at == LOCATED -> fetch() }
#ifndef LOCK_AND_READ_IN_ONE
    :: d_step { at == FETCHED -> begin() }
#else
    :: d_step {
           at == FETCHED ->
           read_generations();
           printf("consumer %d has a snapshot, and waits for the lock\n", me);
           at = QUEUED
       }
    :: d_step { at == QUEUED -> begin() }
#endif
    :: d_step {
           at == BEGUN && to_move && can_move && is_where_we_think ->
           p = next_partition;
           position_locked_by[p] = me;
           to_move = without(to_move, p);
           p = 0;
           if
           :: !to_move ->
#ifndef LOCK_AND_READ_IN_ONE
               read_generations();
#endif
               at = MOVED
           :: else
           fi
       }
    :: atomic {
           at == BEGUN && to_move && can_move && !is_where_we_think ->
           printf("consumer %d: PositionMoved\n", me);
           end_transaction();
#ifdef NO_SECOND_LOOK
           at = FETCHED
#else
           if
           :: forget_batch()
           :: parts == with(only(0), 1) -> part(); at = FETCHED
           fi
#endif
       }
    :: d_step { at == MOVED -> look_up(); at = MARKING }
    :: d_step { at == MARKING && to_mark && is_decided(marker(generation, next_key)) -> mark() }
    :: d_step { at == MARKING && !to_mark -> commit(); end_transaction(); at = COMMITTED_UNHEARD }
    :: atomic {
           at == COMMITTED_UNHEARD && is_more ->
           from[0] = end[0]; from[1] = end[1];
           fetch()
       }
    :: d_step { at == COMMITTED_UNHEARD && !is_more -> forget_batch() }
    :: atomic {
           mishaps > 0 && at != LOST ->
           mishaps--;
           printf("consumer %d is cut off\n", me);
           end_transaction();
           if
           :: end[0] + end[1] > from[0] + from[1] -> part(); at = FETCHED  /* repeat a batch */
           :: forget_batch()                                               /* a new process */
           fi
       }
    od;
    ended++
}

init
{
    atomic { run Consumer(0); run Consumer(1) };
    ended == CONSUMERS ->
    promise(NO_LOSS, applied_in[0] != NEVER && applied_in[1] != NEVER)
}
