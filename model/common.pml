/*
 * Definitions that the models share. A run with -DBREAKS=<promise> checks that promise alone; other
 * runs check all of them.
 */

#define NO_LOSS   1  /* passed records have taken effect, committed events are in Kafka */
#define NO_DOUBLE 2  /* an event takes effect once */
#define IN_ORDER  3  /* per key, and first occurrences only */
#define FENCED    4  /* a process without its partition, shard or lane changes nothing */
#define NO_ORPHAN 5  /* the first row of a key is due, or is dead and holds the key */
#define NOT_BLAMED 6 /* an attempt is spent only by a message that fails alone */
#define PAUSED     7 /* a key that is paused waits until its pause is over */

#ifndef BREAKS
#define promise(which, is_kept) assert(is_kept)
#else
#define promise(which, is_kept) assert(which != BREAKS || (is_kept))
#endif

/* A byte represents a set of small numbers. */
#define only(member)         (1 << (member))
#define below(member)        (only(member) - 1)
#define has(set, member)     (((set) >> (member)) & 1)
#define with(set, member)    ((set) | only(member))
#define without(set, member) ((set) & ~only(member))
