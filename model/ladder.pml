/*
 * The ladder of failures: apply/ladder.py, apply/failures.py.
 *
 * A process applies the records of a partition, a worker tries alone what was stored. Each message
 * has a nature: it takes effect, or it fails wherever its handler is called. A mishap (a deadlock, a
 * lost connection) fails a transaction for a reason that is nobody's fault.
 *
 * A transaction is one atomic step: what it does is computed, then it commits, or is rolled back
 * and repeated one rung lower. How transactions interleave is the subject of the other models.
 *
 * -D<fault> builds in a fault; check.py lists them.
 */

#include "common.pml"

#ifndef MISHAPS
#define MISHAPS  2  /* no more than LOSSES: that many are nobody's failure */
#endif
#define RECORDS  3
#define ATTEMPTS 2  /* failures after which a message is dead */
#define LOSSES   2  /* lost connections of a message alone that don't count, one after the other */

/* Records 0 and 2 have one key. A key is the set of its records. */
#define key_of(record) ((record) == 1 -> only(1) : with(only(0), 2))

/* The call of an UNDONE message raises before it has waited: what it has changed is undone. */
mtype = { GOOD, UNDONE, RAISES, REFUSED, UNCOMMITTABLE, KILLS };
mtype nature[RECORDS];

/* ---- The state of PostgreSQL ---- */

byte position;
byte stored, dead;       /* pipeline.backlog */
byte attempts[RECORDS];
byte losses[RECORDS];

/* ---- State that only the promises read ---- */

byte applied;
byte mishaps = MISHAPS;
byte ended;

/* ---- Faults, and the definitions without them ---- */

#ifdef FOLLOWERS_GO_ON
#define is_behind(record) false
#else
#define is_behind(record) ((stored | aside) & key_of(record) & below(record))
#endif

#ifdef SAME_RUNG_AGAIN
#define lower(rung) (rung)
#else
#define lower(rung) ((rung) < STORED -> (rung) + 1 : (rung))
#endif

#ifdef LOWEST_RUNG_CALLS
#define calls true
#else
#define calls (rung != STORED)
#endif

#ifdef LOSSES_IN_MEMORY
#define losses_after_a_loss 0
#else
#define losses_after_a_loss losses[i] + 1
#endif

#ifdef A_LOSS_IS_A_FAILURE
#define is_one_too_many true
#else
#define is_one_too_many (losses[i] == LOSSES)
#endif

#ifdef UNDO_KEEPS_CHANGES
#define keeps_changes true
#else
#define keeps_changes false
#endif

#define is_fatal(nature) ((nature) == UNCOMMITTABLE || (nature) == KILLS)

/* ---- What a transaction commits ---- */

inline take_effect(record)
{
    promise(NO_DOUBLE, !has(applied, record));
    promise(IN_ORDER, !(key_of(record) & below(record) & ~applied & ~dead));
    applied = with(applied, record)
}

inline count_attempt(record)
{
    promise(NOT_BLAMED, nature[record] != GOOD);
    promise(NO_DOUBLE, !has(applied, record));
    attempts[record]++;
    losses[record] = 0;
    printf("attempt %d of record %d has failed\n", attempts[record], record);
    if
    :: attempts[record] == ATTEMPTS -> dead = with(dead, record); stored = without(stored, record)
    :: else
    fi
}

/* ---- The partition ---- */

#define BATCH   0
#define RUNS    1
#define PIECES  2
#define SINGLES 3
#define STORED  4

#define size_of(rung) ((rung) < PIECES -> RECORDS : ((rung) == PIECES -> 2 : 1))

/* Records from `from` on; `done` takes effect, `aside` is stored, of that `counted` has failed. */
inline execute()
{
    for (i : from .. end - 1) {
        if
        :: is_behind(i) -> aside = with(aside, i)
        :: !is_behind(i) && !calls -> aside = with(aside, i)
        :: !is_behind(i) && calls ->
            if
            :: nature[i] == GOOD -> done = with(done, i)
            :: nature[i] == UNDONE ->
                done = (keeps_changes -> with(done, i) : done);
                aside = with(aside, i);
                counted = with(counted, i)
            :: (rung == BATCH && (nature[i] == RAISES || nature[i] == REFUSED)) ||
               is_fatal(nature[i]) ->
                is_rolled_back = true
            :: nature[i] == REFUSED && rung != BATCH -> aside = with(aside, i)
            :: nature[i] == RAISES && rung != BATCH ->
                aside = with(aside, i);
                counted = with(counted, i)
            fi
        fi
    }
    i = 0
}

inline commit()
{
    stored = stored | aside;
    for (i : from .. end - 1) {
        if
        :: has(done, i) -> take_effect(i)
        :: else
        fi;
        if
        :: has(counted, i) -> count_attempt(i)
        :: else
        fi
    }
    i = 0;
    position = end;
    promise(NO_LOSS, ((applied | stored | dead) & below(position)) == below(position));
    printf("committed on rung %d, the next record is %d\n", rung, position)
}

inline roll_back()
{
#ifdef BLAMED_WHEN_ROLLED_BACK
    count_attempt(from);
#endif
    printf("rolled back on rung %d\n", rung);
    rung = lower(rung);
    end = (end > from + size_of(rung) -> from + size_of(rung) : end);
    forget()
}

inline forget() { done = 0; aside = 0; counted = 0; is_rolled_back = false }

proctype Partition()
{
    byte from, end, rung;
    byte done, aside, counted, i;
    bool is_rolled_back;

    do
    :: position == RECORDS -> break
    :: atomic {
           end == from && position < RECORDS ->
           from = position;
           end = RECORDS;
           if
           :: rung = BATCH
           :: rung = RUNS
           :: rung = PIECES
           fi;
           end = (end > from + size_of(rung) -> from + size_of(rung) : end)
       }
    :: atomic {
           end > from ->
           execute();
           if
           :: is_rolled_back -> roll_back()
           :: else -> commit(); forget(); from = 0; end = 0; rung = BATCH
           fi
       }
    :: atomic { end > from && mishaps > 0 -> mishaps--; roll_back() }
    od;
    ended++
}

/* ---- A worker: one message alone ---- */

inline lose_connection()
{
    if
    :: is_one_too_many -> count_attempt(i)
    :: else -> losses[i] = losses_after_a_loss
    fi
}

#define is_head(record) (has(stored, record) && !(stored & key_of(record) & below(record)))

proctype Worker()
{
    byte i;

    do
    :: atomic {
           stored ->
           if
           :: is_head(0) -> i = 0
           :: is_head(1) -> i = 1
           :: is_head(2) -> i = 2
           fi;
           printf("record %d is tried alone\n", i);
           if
           :: nature[i] == GOOD -> take_effect(i); stored = without(stored, i)
           :: nature[i] == KILLS -> lose_connection()
           :: nature[i] != GOOD && nature[i] != KILLS -> count_attempt(i)
           :: mishaps > 0 -> mishaps--; lose_connection()
           :: mishaps > 0 -> mishaps--; losses[i] = 0  /* a lock in its way */
           fi;
           i = 0
       }
    :: ended && !stored -> break
    od;
    ended++
}

inline choose(record)
{
    if
    :: nature[record] = GOOD
    :: nature[record] = UNDONE
    :: nature[record] = RAISES
    :: nature[record] = REFUSED
    :: nature[record] = UNCOMMITTABLE
    :: nature[record] = KILLS
    fi
}

init
{
    atomic { choose(0); choose(1); choose(2); run Partition(); run Worker() };
    ended == 2 -> promise(NO_LOSS, (applied | dead) == below(RECORDS))
}
