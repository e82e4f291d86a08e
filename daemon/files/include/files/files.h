/* SPDX-License-Identifier: MIT */
/* files.h: all of a file's bytes or none. Blocks on the disk: not for an event loop. */
#ifndef FMHAD_FILES_FILES_H
#define FMHAD_FILES_FILES_H

#include <stddef.h>
#include <sys/types.h>

/* Opens a name below @dir without following links out of it or anywhere. Return: a descriptor that
 * no child inherits, or -1 with errno. */
int files_open_beneath(int dir, const char *name, int flags, mode_t mode);

/* From the file's start, wherever it was read before. Return: 0, or -1 with errno: EIO where it is shorter. */
int files_read_all(int fd, void *data, size_t size);

/* The same from @offset. */
int files_read_at(int fd, void *data, size_t size, off_t offset);

/* Return: 0, or -1 with errno. */
int files_write_at(int fd, const void *data, size_t size, off_t offset);

/* Gives a file that was written and synced its name, for good: the folder is synced, too. Return: 0, or -1 with errno. */
int files_rename(const char *temporary, const char *path);

/*
 * Makes @name in @dir the file of these bytes, readable by its owner alone: written as @temporary,
 * synced, renamed, the directory synced, so that whatever happens there is the old one or the new
 * one. @temporary: in the same directory and nobody else's; one that a crash left is removed.
 * Return: 0, or -1 with errno, and @temporary is gone.
 */
int files_publish(int dir, const char *temporary, const char *name, const void *data, size_t size);

#endif
