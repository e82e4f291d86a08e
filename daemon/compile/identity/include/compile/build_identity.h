/* SPDX-License-Identifier: MIT */
/*
 * build_identity.h: which piece of code an order comes to, of one machine's compiler and sources: what is known
 * of code is kept by it. The SHA-256 of arch, source and options in their order, each with its length, so that
 * no two orders collide. Names have no part in it.
 */
#ifndef FMHAD_COMPILE_BUILD_IDENTITY_H
#define FMHAD_COMPILE_BUILD_IDENTITY_H

#include <proto/build.h>

struct build_identity {
	uint8_t bytes[32];
};

struct build_identity build_identity(const struct kernel_build *build);

/* The same in a word, for pages and files; never 0. */
uint64_t build_identity_word(const struct build_identity *identity);

#endif
