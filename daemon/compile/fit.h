/* SPDX-License-Identifier: MIT */
/*
 * fit.h: which compilers are known to make wrong code for an arch. Asked by whoever is about to have
 * something compiled, and by the helper for people who ask.
 */
#ifndef COMPILE_FIT_H
#define COMPILE_FIT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

/*
 * GFX12 lets a scalar register that a vector instruction has read be written before a later reader
 * may see it: s_wait_alu has to come between. Compilers have put it there since clang 20; code of
 * older ones passes every test on an emulator, which has no such delays, and is wrong on a card now
 * and then. hipRTC does not tell which clang it holds.
 */
#define FIRST_CLANG_WITH_WAITS 20

#define WHAT_TO_INSTALL                                                                            \
	"install clang 20 or newer, as ROCm 7 has it, or PyPI's ziglang and lld-19 "               \
	"(compile.clang, compile.linker; see README)"

static inline bool needs_waits(const char *arch)
{
	return strncmp(arch, "gfx12", 5) == 0;
}

/*
 * @version: as compile_version() tells it
 * @sentence: why not and what to install; as it was where the compiler will do
 * Return: whether what @version names may compile for @arch.
 */
static inline bool compile_fits(const char *version, const char *arch, char *sentence, size_t size)
{
	int name = (int)strcspn(version, " "), words;
	unsigned major = 0;

	if (!needs_waits(arch))
		return true;
	if (sscanf(version, "clang %u", &major) == 1 && major >= FIRST_CLANG_WITH_WAITS)
		return true;
	words = name + (version[name] ? 1 + (int)strcspn(version + name + 1, " ") : 0);
	(void)snprintf(sentence, size,
		       "arch %s: %.*s may leave out s_wait_alu, without which scalar registers are "
		       "read too early there: " WHAT_TO_INSTALL,
		       arch, words, version);
	return false;
}

#endif
