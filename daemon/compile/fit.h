/* SPDX-License-Identifier: MIT */
/*
 * fit.h: which compilers are known to make wrong code for an arch. Asked by whoever is about to have
 * something compiled, and by the helper for people who ask.
 */
#ifndef COMPILE_FIT_H
#define COMPILE_FIT_H

#include <stdbool.h>
#include <stddef.h>

/*
 * @version: as compile_version() tells it
 * @sentence: why not and what to install; as it was where the compiler will do
 * Return: whether what @version names may compile for @arch.
 */
bool compile_fits(const char *version, const char *arch, char *sentence, size_t size);

#endif
