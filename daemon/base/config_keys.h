/* SPDX-License-Identifier: MIT */
/* config_keys.h: the keys of the configuration, as config.c reads and config_document.c explains them. */
#ifndef FMHAD_BASE_CONFIG_KEYS_H
#define FMHAD_BASE_CONFIG_KEYS_H

#include <stddef.h>

#include <base/config.h>

#define NO_UID ((int64_t)UINT32_MAX) /* (uid_t)-1 */

enum key_kind {
	KEY_U32,
	KEY_U64,
	KEY_BOOL,   /* uint32_t */
	KEY_STRING, /* char[], most = its size with the NUL */
	KEY_MODE,   /* uint32_t, written as an octal string */
	KEY_LEVEL,  /* uint32_t, the name of a log level */
	KEY_UIDS,   /* config.admin_uids */
	KEY_PRIORITIES,
	KEY_OBJECT,
	KEY_DEVICES,
};

struct key {
	const char *name;
	enum key_kind kind;
	enum limit_when when; /* a change is taken over */
	size_t offset;
	int64_t least, most;
	const struct key *keys; /* of an object, or of each of an array's */
	const char *help; /* what it means, in which unit, and what no value means; no full stop */
};

extern const struct key config_keys[]; /* up to one without a name */
extern const struct config_device config_default_device;

#endif
