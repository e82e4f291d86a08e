/* SPDX-License-Identifier: MIT */
/*
 * build_identity.h: which piece of code an order comes to, of one machine's compiler and sources: what is known
 * of code is kept by it. The SHA-256 of arch, source and options in their order, each with its length, so that
 * no two orders collide. Names have no part in it.
 */
#ifndef FMHAD_COMPILE_BUILD_IDENTITY_H
#define FMHAD_COMPILE_BUILD_IDENTITY_H

#include <string.h>

#include <nettle/sha2.h>
#include <proto/build.h>

struct build_identity {
	uint8_t bytes[32];
};

static inline void build_identity_add(struct sha256_ctx *sha, const char *text)
{
	uint64_t size = strlen(text);

	sha256_update(sha, sizeof(size), (const uint8_t *)&size);
	sha256_update(sha, size, (const uint8_t *)text);
}

static inline struct build_identity build_identity(const struct kernel_build *build)
{
	struct build_identity identity;
	struct sha256_ctx sha;

	sha256_init(&sha);
	build_identity_add(&sha, build->arch);
	build_identity_add(&sha, build->source);
	for (uint32_t i = 0; i < build->n_options; i++)
		build_identity_add(&sha, build->options[i]);
	sha256_digest(&sha, sizeof(identity.bytes), identity.bytes);
	return identity;
}

/* The same in a word, for pages and files; never 0. */
static inline uint64_t build_identity_word(const struct build_identity *identity)
{
	uint64_t word;

	memcpy(&word, identity->bytes, sizeof(word));
	return word ? word : 1;
}

#endif
