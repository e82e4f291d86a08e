/* SPDX-License-Identifier: MIT */
/* warm.h: what is to be compiled ahead: lines, each the words of a `fmhactl plan`. */
#ifndef CTL_WARM_H
#define CTL_WARM_H

#include <stddef.h>

#define WARM_LINE 256
#define WARM_MOST 4096

struct warm_list {
	char (*lines)[WARM_LINE]; /* given: free() */
	size_t n, capacity;
};

/* Return: 0, or CTL_USAGE with a line printed. */
int warm_add(struct warm_list *list, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* warm_model.c: the problems that serving a model asks for, from its Hugging Face config.json. Return: 0, CTL_IO. */
int warm_add_model(struct warm_list *list, const char *path);

#endif
