/* SPDX-License-Identifier: MIT */
#include <compile/build_identity.h>

#include <nettle/sha2.h>
#include <string.h>

static void add(struct sha256_ctx *sha, const char *text)
{
	uint64_t size = strlen(text);

	sha256_update(sha, sizeof(size), (const uint8_t *)&size);
	sha256_update(sha, size, (const uint8_t *)text);
}

struct build_identity build_identity(const struct kernel_build *build)
{
	struct build_identity identity;
	struct sha256_ctx sha;

	sha256_init(&sha);
	add(&sha, build->arch);
	add(&sha, build->source);
	for (uint32_t i = 0; i < build->n_options; i++)
		add(&sha, build->options[i]);
	sha256_digest(&sha, sizeof(identity.bytes), identity.bytes);
	return identity;
}

uint64_t build_identity_word(const struct build_identity *identity)
{
	uint64_t word;

	memcpy(&word, identity->bytes, sizeof(word));
	return word ? word : 1;
}
