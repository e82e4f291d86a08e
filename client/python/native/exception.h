/* SPDX-License-Identifier: MIT */
/* exception.h: what slot.c needs of C++. */
#ifndef FMHA_SLOT_EXCEPTION_H
#define FMHA_SLOT_EXCEPTION_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Python's functions, found in the process. Return: whether all are there. */
int slot_python_find(void);
/* An exception of Python's with a reference to each of the three. */
struct slot_exception {
	void *type, *value, *traceback;
};
/* Needs the interpreter's lock. */
void slot_exception_take(struct slot_exception *exception, uintptr_t type, uintptr_t value,
			 uintptr_t traceback);
/* Through torch to Python's caller. The references go along. */
__attribute__((noreturn)) void slot_exception_throw(const struct slot_exception *exception);
/* Where torch itself failed on the way to Python. */
__attribute__((noreturn)) void slot_failure_throw(const char *sentence);
/* Frees an optional argument, which torch makes by new. */
void slot_word_free(uint64_t *word);

#ifdef __cplusplus
}
#endif

#endif
