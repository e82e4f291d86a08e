/* SPDX-License-Identifier: MIT */
/*
 * registry_files.h: two exports of registries, without a daemon. What a registry remembers is for one
 * device model and, where the documents say it, one environment (driver, compiler, sources):
 * documents of others are not put together.
 */
#ifndef CTL_REGISTRY_FILES_H
#define CTL_REGISTRY_FILES_H

/*
 * The measured times, priorities and sets of both as one document, which `fmhactl registry import`
 * takes, in @out (NULL: stdout). Of two times of one kernel and shape the newer one stays, and the
 * first file's where they do not say when they were taken; so does its priority and its set of a
 * name. What only a process or a cache knows (runs, flags) stays as the first file has it. Return:
 * CTL_OK, CTL_FAILED (another model or environment; said on stderr), CTL_IO.
 */
int registry_merge_files(const char *first, const char *second, const char *out);

/* Writes a document to @out (NULL: stdout). Return: CTL_OK, CTL_IO. */
int registry_write_file(const char *out, const char *text);

/* Says on stdout, whatever @out is, what the two remember differently. Return: CTL_OK (nothing),
 * CTL_FAILED, CTL_IO. */
int registry_compare_files(const char *first, const char *second, const char *out);

#endif
