/* SPDX-License-Identifier: MIT */
/* config_document.c: the keys as the list in fmhad.json(5). Defaults are what config_init() sets. */
#include <inttypes.h>

#include <base/log.h>

#include "config_keys.h"

/* "-" as roff's minus. */
static void config_document_print_text(FILE *out, const char *text)
{
	for (; *text; text++) {
		if (*text == '-')
			(void)fputs("\\-", out);
		else
			(void)fputc(*text, out);
	}
}

/* @field: holds the default; NULL: there is none. */
static void print_number(FILE *out, const struct key *key, const void *field)
{
	uint64_t value = !field                 ? 0
			 : key->kind == KEY_U32 ? *(const uint32_t *)field
						: *(const uint64_t *)field;

	(void)fprintf(out, "number, %lld to %lld", (long long)key->least, (long long)key->most);
	if (field && !(key->least > 0 && value == 0))
		(void)fprintf(out, "; default %" PRIu64, value);
}

/* @defaults: of the key's object; NULL: it has none. */
static void print_kind(FILE *out, const struct key *key, const void *defaults)
{
	static const uint64_t none = 0;
	const void *field = defaults ? (const char *)defaults + key->offset : (const void *)&none;

	switch (key->kind) {
	case KEY_U32:
	case KEY_U64:
		print_number(out, key, defaults ? field : NULL);
		break;
	case KEY_BOOL:
		(void)fprintf(out, "true or false; default %s",
			      *(const uint32_t *)field ? "true" : "false");
		break;
	case KEY_STRING:
		(void)fprintf(out, "string of %lld to %lld bytes", (long long)key->least,
			      (long long)key->most - 1);
		if (*(const char *)field)
			(void)fprintf(out, "; default \"%s\"", (const char *)field);
		break;
	case KEY_MODE:
		(void)fputs("string of octal digits", out);
		break;
	case KEY_LEVEL:
		(void)fputs("error, warning, notice, info or debug; default ", out);
		(void)fputs(log_level_names[*(const uint32_t *)field], out);
		break;
	case KEY_UIDS:
		(void)fprintf(out, "array of at most %d user numbers; default []",
			      CONFIG_MAX_ADMINS);
		break;
	case KEY_PRIORITIES:
		(void)fprintf(out, "array of at most %d objects; default []",
			      CONFIG_MAX_PRIORITIES);
		break;
	case KEY_DEVICES:
		(void)fprintf(out, "array of 1 to %d objects", PROTO_MAX_DEVICES);
		break;
	case KEY_OBJECT:
		(void)fputs("object", out);
		break;
	}
}

static const void *defaults_below(const struct key *key, const void *defaults)
{
	switch (key->kind) {
	case KEY_OBJECT:
		return (const char *)defaults + key->offset;
	case KEY_DEVICES:
		return &config_default_device;
	default:
		return NULL;
	}
}

/* @path: "limits.", of the object that has @keys */
static void print_keys(FILE *out, const struct key *keys, const char *path, const void *defaults)
{
	for (const struct key *key = keys; key->name; key++) {
		char below[64];

		(void)fprintf(out, ".TP\n\\fB%s%s\\fR (", path, key->name);
		print_kind(out, key, defaults);
		(void)fputs(key->keys             ? ")\n"
			    : key->when == RELOAD ? "; reload)\n"
						  : "; restart)\n",
			    out);
		config_document_print_text(out, key->help);
		(void)fputs(".\n", out);
		if (!key->keys)
			continue;
		(void)snprintf(below, sizeof(below), "%s%s%s.", path, key->name,
			       key->kind == KEY_OBJECT ? "" : "[]");
		print_keys(out, key->keys, below, defaults_below(key, defaults));
	}
}

void config_document(FILE *out)
{
	struct config config;

	config_init(&config);
	print_keys(out, config_keys, "", &config);
}
