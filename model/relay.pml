/*
 * The outbox and its relay: a model of relay/window.py, cursor.py, relay.py and publisher.py.
 *
 * Writers insert rows and commit or roll back in any order; writers of one key lock its aggregate
 * first. Two relays compete for one shard, whose events go to one Kafka partition. Each relay may
 * pause for any time between two steps, also beyond its lease.
 *
 * A snapshot is the set of transactions that have ended: those below its xmax that are not in its
 * running list. Rows are numbered by their id, transactions by their xid, from 1.
 *
 * -D<fault> builds in a fault; check.py lists them.
 */

#include "common.pml"

#ifndef PAGE
#define PAGE    2  /* most events read at once */
#endif
#ifndef MISHAPS
#define MISHAPS 2  /* dead relays, expired leases, failed sends */
#endif
#ifndef SCAN
#define SCAN    1  /* ids that one PAGE scans */
#endif
#ifndef ROWS
#define ROWS    3  /* one for each writer; the last one gets the rest */
#endif
#define WRITERS 3
#define RELAYS  2
#define KEYS    2

/* ---- The state of PostgreSQL ---- */

byte last_xid, sequence;          /* last values assigned */
byte running, committed;          /* transactions */
byte xmax = 1;                    /* the latest ended transaction, plus one */
byte xid_of[ROWS + 1];            /* pipeline.outbox */
byte locked_by[KEYS];             /* the aggregate of a key: its transaction, or 0 */

#define NOBODY 255

byte cursor_owner = NOBODY;       /* pipeline.outbox_cursor */
byte cursor_seen = 1, cursor_target, cursor_last_id, cursor_high_id;
bool has_token[RELAYS];           /* the relay's token equals the row's */

bool is_in_time[RELAYS];          /* the lease has not ended by the relay's clock */

/* ---- The state of Kafka ---- */

#define NOTHING 0

byte landed;                      /* events in the log */
byte sent[RELAYS];                /* the event in flight */
bool is_acknowledged[RELAYS];
byte late;                        /* abandoned events that may still land */

/* ---- State that only the promises read ---- */

byte before[WRITERS + 2];         /* earlier committed transactions of the key */
byte committed_of[KEYS];

byte mishaps = MISHAPS;
byte ended;

byte i, count, last_taken, scan_to, next;  /* scratch, within one step */
inline tidy_up() { i = 0; count = 0; last_taken = 0; scan_to = 0; next = 0 }

/* ---- Snapshots, windows and cursors ---- */

#define snapshot (below(xmax) & ~running)
#define is_row_of(id, transactions) has((transactions) & committed, xid_of[id])

/* ---- Faults ---- */

#if defined(CURSOR_ON_ID)
#define is_fresh(id)  (is_row_of(id, snapshot) && id > last_id)
#define is_passed(id) (has(committed, xid_of[id]) && id <= last_id)

#elif defined(CURSOR_ON_OLDEST_RUNNING)
#define visible (below(xmax) & ((running & -running) - 1))
#define noted   visible

#elif defined(NO_RUNNING_LIST)
#define noted below(xmax)

#elif defined(SNAPSHOT_OF_A_WRITER)
byte own_xid;  /* the relay reads in a transaction that inserts; its snapshot lacks it */
bool has_begun;
#define noted (snapshot | (below(xmax) & only(own_xid)))

#elif defined(BOUNDED_BY_ID)
#define is_fresh(id) (is_row_of(id, snapshot & ~seen) && (id > high_id || seen >> xid_of[id]))

#elif defined(ORDER_BY_XID)
#define comes_before(one, other) (xid_of[one] < xid_of[other])

#elif defined(NO_TOKEN)
#define is_owner true

#elif defined(NO_LOCAL_DEADLINE)
#define may_send true
#endif

/* ---- The definitions without faults ---- */

#ifndef visible
#define visible snapshot                  /* transactions whose rows FRESH returns */
#endif
#ifndef noted
#define noted snapshot                    /* the snapshot that FRESH returns */
#endif
#ifndef is_fresh
#define is_fresh(id) is_row_of(id, visible & ~seen)
#endif
#ifndef is_passed                         /* published according to the cursor */
#define is_passed(id) (is_row_of(id, seen) || is_row_of(id, target) && id <= last_id)
#endif
#ifndef comes_before
#define comes_before(one, other) (one < other)
#endif
#ifndef is_owner
#define is_owner has_token[me]
#endif
#ifndef may_send
#define may_send is_in_time[me]           /* Cursor.holds_lease */
#endif

/* ---- Writers ---- */

inline end_transaction(which, its_key)
{
    running = without(running, which);
    xmax = (which < xmax -> xmax : which + 1);
    locked_by[its_key] = 0;
    ended++
}

inline begin(which) { last_xid++; which = last_xid; running = with(running, which) }

inline insert(which, its_key)
{
    sequence++;
    xid_of[sequence] = which;
    printf("transaction %d of key %d inserts row %d\n", which, its_key, sequence)
}

inline commit(which, its_key)
{
    committed = with(committed, which);
    before[which] = committed_of[its_key];
    committed_of[its_key] = with(committed_of[its_key], which);
    printf("transaction %d commits\n", which);
    end_transaction(which, its_key)
}

/* One transaction. An earlier write has given it an xid before it loads its aggregate. */
proctype Writer(byte key, rows; bool has_twin)
{
    byte xid;

    atomic {
        begin(xid);
        if
        :: has_twin -> run Writer(key, rows, false)
        :: else
        fi
    };
#ifndef LOCK_AFTER_INSERT
    atomic { locked_by[key] == 0 -> locked_by[key] = xid };
#endif
    do
    :: d_step { rows > 0 -> rows--; insert(xid, key) }
    :: rows == 0 -> break
    od;
#ifdef LOCK_AFTER_INSERT
    atomic { locked_by[key] == 0 -> locked_by[key] = xid };
#endif
    if
    :: d_step { commit(xid, key) }
    :: d_step { printf("transaction %d rolls back\n", xid); end_transaction(xid, key) }
    fi
}

/* ---- Kafka ---- */

#define precedes(one, other) (has(before[xid_of[other]], xid_of[one]) \
                           || xid_of[one] == xid_of[other] && one < other)

inline land(event)
{
    if
    :: !has(landed, event) ->
        printf("event %d is in Kafka\n", event);
        assert(has(committed, xid_of[event]));
        for (i : 1 .. ROWS) {
            promise(IN_ORDER, has(landed, i) || !precedes(i, event))
        }
        landed = with(landed, event);
        tidy_up()
    :: else -> printf("event %d is in Kafka again\n", event)
    fi
}

inline land_late(event) { late = without(late, event); printf("late, "); land(event) }

active proctype Kafka()
{
end:
    do
    :: d_step { sent[0] && !is_acknowledged[0] -> land(sent[0]); is_acknowledged[0] = true }
    :: d_step { sent[1] && !is_acknowledged[1] -> land(sent[1]); is_acknowledged[1] = true }
    :: d_step { has(late, 1) -> land_late(1) }
    :: d_step { has(late, 2) -> land_late(2) }
    :: d_step { has(late, 3) -> land_late(3) }
#if ROWS > 3
    :: d_step { has(late, 4) -> land_late(4) }
#endif
    od
}

/* ---- The relay ---- */

mtype = { IDLE, READY, SENDING, CHECKED, WAITING, FAILED }

/* window.fresh: rows visible since `seen`, and the progress after they are sent. */
inline fresh()
{
    then_seen = noted; then_target = 0; then_last_id = 0; then_high_id = 0;
    for (i : 1 .. ROWS) {
        if
        :: is_fresh(i) && count < PAGE -> take(i)
        :: is_fresh(i) && count == PAGE ->
            then_seen = seen; then_target = noted;
            then_last_id = last_taken; then_high_id = sequence
        :: else
        fi
    }
#if defined(CURSOR_ON_ID)
    then_last_id = (count > 0 -> last_taken : last_id)
#elif defined(BOUNDED_BY_ID)
    then_high_id = sequence
#endif
}

/* window.page: the next ids of a window larger than a page. */
inline page()
{
#ifdef PAGE_PAST_ITS_TARGET
    target = noted; high_id = sequence;
#endif
    scan_to = (high_id < last_id + SCAN -> high_id : last_id + SCAN);
    for (i : last_id + 1 .. scan_to) {
        if
        :: is_row_of(i, target & ~seen) && count < PAGE -> take(i)
        :: else
        fi
    }
    then_seen = seen; then_target = target; then_high_id = high_id;
    if
    :: count == PAGE -> then_last_id = last_taken
    :: count < PAGE && scan_to < high_id -> then_last_id = scan_to
    :: count < PAGE && scan_to == high_id ->
        then_seen = target; then_target = 0; then_last_id = 0; then_high_id = 0
    fi
}

inline take(id) { to_send = with(to_send, id); count++; last_taken = id }

/* Relay._read: the next page. */
inline read()
{
    if
    :: target -> page()
    :: else -> fresh()
    fi;
    printf("relay %d reads %d event(s)\n", me, count);
    tidy_up();
    if
    :: to_send -> at = SENDING
    :: else -> is_dirty = is_dirty || then_target; advance()
    fi
}

inline advance()
{
    seen = then_seen; target = then_target; last_id = then_last_id; high_id = then_high_id;
    then_seen = 0; then_target = 0; then_last_id = 0; then_high_id = 0;
    at = READY
}

/* publisher._send_chain writes one batch to the socket; the next one waits for the answer. */
inline hand_over()
{
    for (i : 1 .. ROWS) {
        if
        :: has(to_send, i) && (next == NOTHING || comes_before(i, next)) -> next = i
        :: else
        fi
    }
    sent[me] = next;
    printf("relay %d sends event %d\n", me, next);
    tidy_up();
    strays = strays + !has_token[me];
    promise(FENCED, strays <= 1);
    at = WAITING
}

inline go_on()
{
    to_send = without(to_send, sent[me]);
    abandon_send();
    if
    :: to_send -> at = SENDING
    :: else -> is_dirty = true; advance()
    fi
}

/* A batch that is in the socket and not yet in Kafka may still land. */
inline abandon_send()
{
    if
    :: sent[me] && !is_acknowledged[me] && !has(landed, sent[me]) -> late = with(late, sent[me])
    :: else
    fi;
    sent[me] = NOTHING;
    is_acknowledged[me] = false
}

/* _CLAIM: a shard without an owner, with an expired lease, or of this relay. */
#define may_claim (cursor_owner == NOBODY || cursor_owner == me || !is_in_time[cursor_owner])

inline claim()
{
    cursor_owner = me;
    has_token[me] = true;
    has_token[1 - me] = false;
    seen = cursor_seen; target = cursor_target; last_id = cursor_last_id; high_id = cursor_high_id;
    is_in_time[me] = true;
    printf("relay %d claims the shard\n", me);
    at = READY
}

/* _WRITE, if the token is unchanged. */
inline write()
{
    printf("relay %d writes the cursor\n", me);
    for (i : 1 .. ROWS) { promise(NO_LOSS, has(landed, i) || !is_passed(i)) }
    promise(FENCED, (cursor_seen & ~seen) == 0);
    promise(FENCED, cursor_seen != seen || cursor_last_id <= last_id || !target);
    cursor_seen = seen; cursor_target = target; cursor_last_id = last_id; cursor_high_id = high_id;
    is_in_time[me] = true;
    is_dirty = false;
    tidy_up()
}

/* Cursor.forget: discard the progress in memory; the database's is read next. */
inline forget()
{
    abandon_send();
    to_send = 0;
    then_seen = 0; then_target = 0; then_last_id = 0; then_high_id = 0;
    seen = 0; target = 0; last_id = 0; high_id = 0;
    strays = 0; is_dirty = false;
    at = IDLE
}

/* Progress is written later than it is made; a lease is also extended during a send. */
#define must_write     (at == READY && is_dirty || at != IDLE && at != FAILED && !is_in_time[me])
#define is_nothing_new (seen == noted && !target)

proctype Relay(byte me)
{
    mtype at = IDLE;
    byte seen, target, last_id, high_id;                      /* window.Progress */
    byte to_send;                                             /* window.Page */
    byte then_seen, then_target, then_last_id, then_high_id;  /* progress after it is sent */
    bool is_dirty;
    byte strays;                                              /* batches sent without the shard */

    do
    :: d_step { at == IDLE && may_claim -> claim() }
    :: d_step { at == READY && !is_nothing_new -> read() }
#ifdef SNAPSHOT_OF_A_WRITER
    :: d_step { at == READY && !has_begun -> has_begun = true; begin(own_xid) }
    :: d_step {
           at == READY && own_xid ->
           read();
           insert(own_xid, 1);
           commit(own_xid, 1);
           own_xid = 0
       }
#endif
    :: d_step { at == SENDING && may_send -> at = CHECKED }
    :: d_step { at == SENDING && !may_send -> printf("relay %d: LeaseExpired\n", me); at = FAILED }
    :: d_step { at == CHECKED -> hand_over() }
    :: d_step { at == WAITING && is_acknowledged[me] -> go_on() }
    :: d_step {
           at == WAITING && mishaps > 0 ->
           mishaps--;
           printf("relay %d: NotSent\n", me);
#ifdef PAST_A_FAILED_SEND
           go_on()
#else
           at = FAILED
#endif
       }
    :: d_step {
           at == FAILED ->
           if
           :: is_dirty && is_owner -> write()
           :: else
           fi;
           forget()
       }
    :: d_step { must_write && is_owner -> write() }
    :: d_step {
           must_write && !is_owner ->
           printf("relay %d: the shard went to another\n", me);
           forget()
       }
    :: d_step {
           is_in_time[me] && mishaps > 0 ->
           mishaps--;
           printf("the lease of relay %d ends\n", me);
           is_in_time[me] = false
       }
    :: d_step {
           at != IDLE && mishaps > 0 ->
           mishaps--;
           printf("relay %d is killed\n", me);
           is_in_time[me] = false;
           forget()
       }
    :: d_step {
           at == READY && !is_dirty && is_nothing_new && ended == WRITERS ->
           for (i : 1 .. ROWS) { promise(NO_LOSS, has(landed, i) || !has(committed, xid_of[i])) }
           cursor_owner = (is_owner -> NOBODY : cursor_owner);
           tidy_up()
       };
       break
    od
}

/* Writers of a key are symmetric, and so are relays: the first is the one that begins first. */
init
{
    atomic { run Writer(0, 1, true); run Relay(0) };
#ifndef SNAPSHOT_OF_A_WRITER
    run Writer(1, ROWS - 2, false);
#endif
    has_token[0] -> run Relay(1)
}
