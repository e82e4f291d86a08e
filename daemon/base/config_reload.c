/* SPDX-License-Identifier: MIT */
/* config_reload.c: what of a configuration that was read again can be taken over by a running daemon. */
#include <stdio.h>
#include <string.h>

#include "config_keys.h"

struct reload {
	struct config *running;
	char *restart;
	size_t n;
	uint32_t n_changed;
};

static size_t key_bytes(const struct key *key)
{
	switch (key->kind) {
	case KEY_U64:
		return sizeof(uint64_t);
	case KEY_STRING:
		return (size_t)key->most;
	default:
		return sizeof(uint32_t);
	}
}

static void note_restart(struct reload *reload, const char *path, const char *name)
{
	size_t used = strlen(reload->restart);

	(void)snprintf(reload->restart + used, reload->n - used, "%s%s%s", used ? ", " : "", path,
		       name);
}

static void config_reload_take(struct reload *reload, const struct key *key, const char *path,
			       void *running, const void *next, size_t bytes)
{
	if (memcmp(running, next, bytes) == 0)
		return;
	if (key->when == RESTART) {
		note_restart(reload, path, key->name);
		return;
	}
	memcpy(running, next, bytes);
	reload->n_changed++;
}

/* Of arrays the number and the elements lie side by side in struct config. */
static void take_array(struct reload *reload, const struct key *key, const struct config *next)
{
	struct config *running = reload->running;

	switch (key->kind) {
	case KEY_UIDS:
		config_reload_take(reload, key, "", &running->n_admins, &next->n_admins,
				   sizeof(next->n_admins) + sizeof(next->admin_uids));
		break;
	case KEY_PRIORITIES:
		config_reload_take(reload, key, "", &running->n_priorities, &next->n_priorities,
				   sizeof(next->n_priorities) + sizeof(next->priorities));
		break;
	default:
		config_reload_take(reload, key, "", &running->n_devices, &next->n_devices,
				   sizeof(next->n_devices) + sizeof(next->devices));
	}
}

static void take_keys(struct reload *reload, const struct key *keys, const char *path,
		      void *running, const struct config *config, const void *next)
{
	for (const struct key *key = keys; key->name; key++) {
		void *field = (char *)running + key->offset;
		const void *next_field = (const char *)next + key->offset;
		char below[64];

		if (key->kind == KEY_OBJECT) {
			(void)snprintf(below, sizeof(below), "%s%s.", path, key->name);
			take_keys(reload, key->keys, below, field, config, next_field);
		} else if (key->keys || key->kind == KEY_UIDS) {
			take_array(reload, key, config);
		} else {
			config_reload_take(reload, key, path, field, next_field, key_bytes(key));
		}
	}
}

uint32_t config_reload(struct config *running, const struct config *next, char *restart, size_t n)
{
	struct reload reload = {.running = running, .restart = restart, .n = n};

	restart[0] = '\0';
	take_keys(&reload, config_keys, "", running, next, next);
	return reload.n_changed;
}
