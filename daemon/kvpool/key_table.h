/* SPDX-License-Identifier: MIT */
/*
 * key_table.h: records found by their keys, and queues of them; links are numbers of records. Pages in memory (kvpool.c) and
 * places of a file (kvspill.c) are such records.
 */
#ifndef FMHAD_KVPOOL_KEY_TABLE_H
#define FMHAD_KVPOOL_KEY_TABLE_H

#include <stddef.h>

#include <kvpool/kvpool.h>

#define NONE      UINT32_MAX
#define LINE      64 /* a record comes with one look at memory */
#define KEY_WORDS (KVPOOL_KEY_BYTES / sizeof(uint64_t))

struct record {
	_Alignas(LINE) uint8_t key[KVPOOL_KEY_BYTES];
	uint64_t checksum;       /* of a place's contents */
	uint32_t before, behind; /* in a queue */
	uint32_t n_pins;         /* of a page */
	uint32_t page;           /* of a place: where its contents are in memory, or NONE */
	uint8_t state;
};

/* Of the index by keys: a record stands where its hash says, or behind that without a gap. */
struct slot {
	uint32_t hash, record;
};

struct key_table {
	uint64_t secret[KEY_WORDS + 1];
	uint32_t n, hash_mask;
	struct slot *slots; /* twice as many as records, or more */
	struct record *records;
};

/* A ring without a node of its own. */
struct queue {
	uint32_t first, last;
};

#define QUEUE_EMPTY ((struct queue){NONE, NONE})

/* Return: whether there was memory for it; key_table_deinit() in any case. */
bool key_table_init(struct key_table *table, uint32_t n, uint64_t secret);
void key_table_deinit(struct key_table *table);
uint64_t key_table_cost(uint32_t n);

/* The record of @key that was added; NONE: there is none. */
uint32_t key_table_find(const struct key_table *table, uint32_t hash,
			const uint8_t key[KVPOOL_KEY_BYTES]);
/* @record: its key is set */
void key_table_add(struct key_table *table, uint32_t hash, uint32_t record);
void key_table_remove(struct key_table *table, uint32_t record);

void queue_append(struct key_table *table, struct queue *queue, uint32_t record);
void queue_remove(struct key_table *table, struct queue *queue, uint32_t record);

static inline uint64_t key_table_mix(uint64_t a, uint64_t b)
{
	unsigned __int128 product = (unsigned __int128)a * b;

	return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* One by one: as an array the compiler takes them through memory once more. */
static inline uint64_t key_word(const uint8_t key[KVPOOL_KEY_BYTES], size_t i)
{
	uint64_t word;

	__builtin_memcpy(&word, key + i * sizeof(word), sizeof(word));
	return word;
}

/* Multiplied with what nobody outside knows: whoever chooses keys does not choose slots. */
static inline uint32_t key_table_hash(const struct key_table *table,
				      const uint8_t key[KVPOOL_KEY_BYTES])
{
	const uint64_t *secret = table->secret;
	uint64_t hash = key_table_mix(key_word(key, 0) ^ secret[0], key_word(key, 1) ^ secret[1]) ^
			key_table_mix(key_word(key, 2) ^ secret[2], key_word(key, 3) ^ secret[3]);

	return (uint32_t)key_table_mix(hash, secret[4]);
}

static inline bool record_has_key(const struct record *record, const uint8_t key[KVPOOL_KEY_BYTES])
{
	return ((key_word(record->key, 0) ^ key_word(key, 0)) |
		(key_word(record->key, 1) ^ key_word(key, 1)) |
		(key_word(record->key, 2) ^ key_word(key, 2)) |
		(key_word(record->key, 3) ^ key_word(key, 3))) == 0;
}

#endif
