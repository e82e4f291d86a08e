/* SPDX-License-Identifier: MIT */
#include "recent.h"

#include <stdlib.h>
#include <string.h>

#include "cleanup.h"

struct recent_entry {
	struct recent_entry *next;
	struct cache_key key;
	struct cache_entry *entry;
};

static uint64_t size_of(const struct cache_entry *entry)
{
	return sizeof(struct recent_entry) + sizeof(*entry) + entry->code_bytes +
	       (entry->log ? strlen(entry->log) + 1 : 0);
}

static struct cache_entry *copy_entry(const struct cache_entry *entry)
{
	_cleanup_(cache_entry_freep) struct cache_entry *copy = malloc(sizeof(*copy));
	struct cache_entry *given;

	if (!copy)
		return NULL;
	*copy = *entry;
	copy->log = strdup(entry->log ? entry->log : "");
	copy->code = malloc(entry->code_bytes ? entry->code_bytes : 1);
	if (!copy->log || !copy->code)
		return NULL;
	memcpy(copy->code, entry->code, entry->code_bytes);
	given = copy;
	copy = NULL;
	return given;
}

static void drop(struct recent *recent, struct recent_entry **at)
{
	struct recent_entry *item = *at;

	*at = item->next;
	recent->n--;
	recent->bytes -= size_of(item->entry);
	(void)cache_entry_free(item->entry);
	free(item);
}

void recent_deinit(struct recent *recent)
{
	while (recent->first)
		drop(recent, &recent->first);
}

static struct recent_entry **find(struct recent *recent, const struct cache_key *key)
{
	struct recent_entry **at = &recent->first;

	while (*at && memcmp(&(*at)->key, key, sizeof(*key)) != 0)
		at = &(*at)->next;
	return at;
}

void recent_remove(struct recent *recent, const struct cache_key *key)
{
	struct recent_entry **at = find(recent, key);

	if (*at)
		drop(recent, at);
}

static void drop_last(struct recent *recent)
{
	struct recent_entry **at = &recent->first;

	while ((*at)->next)
		at = &(*at)->next;
	drop(recent, at);
}

void recent_put(struct recent *recent, const struct cache_key *key, const struct cache_entry *entry)
{
	uint64_t bytes = size_of(entry);
	struct recent_entry *item;

	recent_remove(recent, key);
	if (bytes > recent->max_bytes)
		return;
	while (recent->bytes + bytes > recent->max_bytes)
		drop_last(recent);
	item = malloc(sizeof(*item));
	if (!item)
		return;
	*item = (struct recent_entry){.key = *key, .entry = copy_entry(entry)};
	if (!item->entry) {
		free(item);
		return;
	}
	item->next = recent->first;
	recent->first = item;
	recent->n++;
	recent->bytes += size_of(item->entry);
}

int recent_load(struct recent *recent, const struct cache_key *key, struct cache_entry **ret_entry)
{
	struct recent_entry **at = find(recent, key), *item = *at;

	if (!item)
		return CACHE_MISS;
	*at = item->next;
	item->next = recent->first;
	recent->first = item;
	*ret_entry = copy_entry(item->entry);
	return *ret_entry ? 0 : CACHE_MISS;
}
