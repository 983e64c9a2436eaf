/*
 * What the models share. A run with -DBREAKS=<promise> watches that promise alone; other runs
 * watch all of them.
 */

#define NO_LOSS   1  /* what was passed over has taken effect, what was committed is in Kafka */
#define NO_DOUBLE 2  /* an event takes effect once */
#define IN_ORDER  3  /* per key, and first occurrences only */
#define FENCED    4  /* who has lost his partition, shard or lane changes nothing any more */
#define NO_ORPHAN 5  /* the first row of a key is due some day, or waits for a person */

#ifndef BREAKS
#define promise(which, is_kept) assert(is_kept)
#else
#define promise(which, is_kept) assert(which != BREAKS || (is_kept))
#endif

/* A byte as a set of small numbers. */
#define only(member)         (1 << (member))
#define below(member)        (only(member) - 1)
#define has(set, member)     (((set) >> (member)) & 1)
#define with(set, member)    ((set) | only(member))
#define without(set, member) ((set) & ~only(member))
