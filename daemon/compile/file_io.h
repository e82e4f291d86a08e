/* SPDX-License-Identifier: MIT */
/* file_io.h: all of a file's bytes or none. */
#ifndef FMHAD_COMPILE_FILE_IO_H
#define FMHAD_COMPILE_FILE_IO_H

#include <stddef.h>

/* From the file's start, wherever it was read before. Return: 0, or -1: shorter, or errno says. */
int read_all(int fd, void *data, size_t size);
int write_all(int fd, const void *data, size_t size);

#endif
