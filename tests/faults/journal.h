/* SPDX-License-Identifier: MIT */
/*
 * journal.h: what a process does to the files below $FMHA_JOURNAL_ROOT, appended to the file
 * $FMHA_JOURNAL: what power_loss.py cuts off and reorders. One record each:
 *
 *     VERB \0 PATH \0 OTHER PATH \0 SIZE \n and SIZE bytes
 *
 * create, data (the whole file as it is now), sync (of a file or a folder), rename, unlink. Without
 * the variables nothing is recorded.
 */
#ifndef JOURNAL_H
#define JOURNAL_H

#include <sys/types.h>

/* Each gives back what it was given of the call's result. */
int journal_opened(int fd, int flags);
ssize_t journal_wrote(int fd, ssize_t result);
int journal_synced(int fd, int result);

/* Before the call, as long as the old name is there. */
void journal_renaming(int old_dir, const char *old, int new_dir, const char *new);
void journal_unlinking(int dir, const char *name);

#endif
