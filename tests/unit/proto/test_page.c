/* SPDX-License-Identifier: MIT */
/*
 * proto/PROTOCOL.md against the code: the parts between <!-- begin NAME --> and <!-- end NAME -->
 * are generated here and must be what the page says. `test_page --update` rewrites them. Its golden
 * messages are read back from the page, decoded, and encoded again byte for byte.
 */
#include <ctype.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <proto/error.h>
#include <proto/problem.h>

#include "field.h"
#include "golden.h"
#include "tables.h"

struct text {
	char *data;
	size_t size;
};

static char *read_page(void)
{
	FILE *file = fopen(PROTOCOL_PAGE, "r");
	struct text text = {0};
	FILE *copy = open_memstream(&text.data, &text.size);
	int byte;

	assert_non_null(file);
	assert_non_null(copy);
	while ((byte = fgetc(file)) != EOF)
		(void)fputc(byte, copy);
	(void)fclose(file);
	(void)fclose(copy);
	return text.data;
}

/* ---- the generated parts ---- */

static void print_limits(FILE *out)
{
	fprintf(out, "| limit | value |\n|---|---|\n");
	fprintf(out, "| frame, header included | %d bytes |\n", PROTO_MAX_FRAME);
	fprintf(out, "| frame before hello was answered | %d bytes |\n",
		PROTO_MAX_FRAME_BEFORE_HELLO);
	fprintf(out, "| depth; the message's own array is depth 1 | %d |\n", PROTO_MAX_DEPTH);
	fprintf(out, "| values: each scalar, key, string and container counts | %d |\n",
		PROTO_MAX_NODES);
	fprintf(out, "| one `str` inside a message | %d bytes |\n", PROTO_MAX_STRING);
	fprintf(out, "| one `bin` inside a message | %d bytes |\n", PROTO_MAX_BIN);
	fprintf(out, "| file descriptors with one `sendmsg` | %d |\n", PROTO_MAX_FDS);
}

static void print_methods(FILE *out)
{
	static const char *const servers[] = {
		[PROTO_FRONT] = "front",
		[PROTO_WORKER] = "worker",
		[PROTO_BOTH] = "both",
		[PROTO_CONTROL] = "internal",
	};

	fprintf(out, "| method | served by | fds in | fds out | params | result |\n"
		     "|---|---|---|---|---|---|\n");
	for (int i = 0; i < PROTO_N_METHODS; i++)
		fprintf(out, "| `%s` | %s | %d | %d | %s | %s |\n", proto_methods[i].name,
			servers[proto_methods[i].server], proto_methods[i].fds_in,
			proto_methods[i].fds_out, proto_params_tables[i]->name,
			proto_result_tables[i]->name);
}

static void print_errors(FILE *out)
{
	fprintf(out, "| code | name | meaning |\n|---|---|---|\n");
#define PRINT_ERROR(name, value, sentence)                                                         \
	fprintf(out, "| %d | %s | %s |\n", FMHA_##name, fmha_error_name(FMHA_##name), sentence);
	FMHA_ERRORS(PRINT_ERROR)
}

static void print_roles(FILE *out)
{
	static const char *const directions[] = {"", "in", "out", "inout"};

	fprintf(out, "| role | dimensions | direction |\n|---|---|---|\n");
	for (int i = 0; i < FMHA_N_TENSORS; i++)
		fprintf(out, "| `%s` | %s | %s |\n", proto_roles[i].name, proto_roles[i].dims,
			directions[proto_roles[i].input + 2 * proto_roles[i].output]);
}

static void print_type(FILE *out, const struct field *field)
{
	static const char *const plain[] = {
		[FIELD_U32] = "uint32",
		[FIELD_U64] = "uint64",
		[FIELD_I32] = "int32",
		[FIELD_BOOL] = "bool",
		[FIELD_F32] = "float32",
		[FIELD_F64] = "float64",
		[FIELD_STRIDE] = "array of int64",
		[FIELD_EXTENT] = "array of int64",
	};

	switch (field->type) {
	case FIELD_STRING:
		fprintf(out, "str, at most %zu bytes", field->size - 1);
		break;
	case FIELD_BYTES:
		fprintf(out, "bin, at most %zu bytes", field->size);
		break;
	case FIELD_ENUM:
		if (field->names->n == FMHA_N_TENSORS) {
			fprintf(out, "str: a role");
			break;
		}
		for (uint32_t i = 0; i < field->names->n; i++)
			fprintf(out, "%s`%s`", i ? ", " : "", field->names->names[i]);
		break;
	case FIELD_STRUCT:
		fprintf(out, "map: %s", field->table->name);
		break;
	case FIELD_ARRAY:
		fprintf(out, "array of %s, at most %u", field->table->name, field->capacity);
		break;
	case FIELD_NUMBERS:
		fprintf(out, "array of %u uint64", field->capacity);
		break;
	case FIELD_TENSORS:
		fprintf(out, "map: role to %s", field->table->name);
		break;
	default:
		fprintf(out, "%s", plain[field->type]);
		if (field->type == FIELD_U64 && field->min > 0)
			fprintf(out, " from %lld", (long long)field->min);
		if (field->type == FIELD_I32 && (int64_t)field->max < 0)
			fprintf(out, " below 0");
	}
}

static void print_default(FILE *out, const struct field *field)
{
	switch (field->type) {
	case FIELD_BOOL:
		fprintf(out, "false");
		break;
	case FIELD_F32:
		fprintf(out, "%s", field->fallback ? "see there" : "0");
		break;
	case FIELD_ENUM:
		fprintf(out, "`%s`", field->names->names[0]);
		break;
	case FIELD_STRING:
	case FIELD_BYTES:
	case FIELD_ARRAY:
	case FIELD_TENSORS:
		fprintf(out, "empty");
		break;
	case FIELD_STRIDE:
		fprintf(out, "packed");
		break;
	case FIELD_EXTENT:
		fprintf(out, "not said");
		break;
	default:
		fprintf(out, "%lld", (long long)field->fallback);
	}
}

static void print_fields(FILE *out)
{
	const struct tables tables = tables_all();

	for (size_t i = 0; i < tables.n; i++) {
		const struct field_table *table = tables.at[i];

		fprintf(out,
			"%s**%s**\n\n| field | type | default | meaning |\n|---|---|---|---|\n",
			i ? "\n" : "", table->name);
		for (uint32_t j = 0; j < table->n_fields; j++) {
			const struct field *field = &table->fields[j];

			fprintf(out, "| `%s` | ", field->name);
			print_type(out, field);
			fprintf(out, " | ");
			if (field->optional)
				print_default(out, field);
			else
				fprintf(out, "required");
			fprintf(out, " | %s |\n", field->note ? field->note : "");
		}
	}
}

static void print_golden(FILE *out, const struct golden *golden)
{
	const struct proto_buffer *frame = &golden->frame;

	fprintf(out, "```golden %s\n", golden->title);
	for (size_t at = 0; at < frame->size; at += 16) {
		fprintf(out, "%04zx ", at);
		for (size_t i = at; i < at + 16; i++) {
			if (i < frame->size)
				fprintf(out, " %02x", frame->data[i]);
			else
				fprintf(out, "   ");
		}
		fprintf(out, "  ");
		for (size_t i = at; i < at + 16 && i < frame->size; i++)
			(void)fputc(frame->data[i] > 0x20 && frame->data[i] < 0x7f &&
						    frame->data[i] != '`'
					    ? frame->data[i]
					    : '.',
				    out);
		(void)fputc('\n', out);
	}
	fprintf(out, "```\n");
}

static void print_goldens(FILE *out)
{
	struct golden goldens[GOLDEN_MAX];
	size_t n = golden_all(goldens);
	bool first = true;

	for (size_t i = 0; i < n; i++) {
		if (!goldens[i].on_page)
			continue;
		if (!first)
			(void)fputc('\n', out);
		first = false;
		print_golden(out, &goldens[i]);
	}
	golden_free(goldens, n);
}

static const struct part {
	const char *name;
	void (*print)(FILE *out);
} parts[] = {
	{"limits", print_limits}, {"methods", print_methods}, {"errors", print_errors},
	{"roles", print_roles},   {"fields", print_fields},   {"goldens", print_goldens},
};

static char *part_text(const struct part *part)
{
	struct text text = {0};
	FILE *out = open_memstream(&text.data, &text.size);

	assert_non_null(out);
	part->print(out);
	(void)fclose(out);
	return text.data;
}

/* Where the part's text starts and ends in the page. */
static void find_part(char *page, const char *name, char **ret_start, char **ret_end)
{
	char mark[64];

	(void)snprintf(mark, sizeof(mark), "<!-- begin %s -->\n", name);
	*ret_start = strstr(page, mark);
	if (!*ret_start)
		fail_msg("%s: no '%s'", PROTOCOL_PAGE, mark);
	*ret_start += strlen(mark);
	(void)snprintf(mark, sizeof(mark), "<!-- end %s -->\n", name);
	*ret_end = strstr(*ret_start, mark);
	if (!*ret_end)
		fail_msg("%s: no '%s'", PROTOCOL_PAGE, mark);
}

static void the_page_is_up_to_date(void **state)
{
	char *page = read_page();

	(void)state;
	for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++) {
		char *expected = part_text(&parts[i]), *start, *end;
		size_t same = 0;

		find_part(page, parts[i].name, &start, &end);
		*end = '\0';
		while (start[same] && start[same] == expected[same])
			same++;
		if (start[same] != expected[same])
			fail_msg("PROTOCOL.md, part '%s' is stale at: %.60s\nexpected: %.60s\n"
				 "`test_page --update` rewrites it",
				 parts[i].name, start + same, expected + same);
		*end = '<';
		free(expected);
	}
	free(page);
}

static void update_page(void)
{
	for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++) {
		char *page = read_page(), *text = part_text(&parts[i]), *start, *end;
		FILE *file;

		find_part(page, parts[i].name, &start, &end);
		file = fopen(PROTOCOL_PAGE, "w");
		assert_non_null(file);
		(void)fwrite(page, 1, (size_t)(start - page), file);
		(void)fputs(text, file);
		(void)fputs(end, file);
		(void)fclose(file);
		free(page);
		free(text);
	}
}

/* ---- the page's own bytes ---- */

/* Reads a dump's lines into bytes; stops at the closing fence. */
static size_t read_dump(const char *at, uint8_t *ret_bytes, size_t capacity)
{
	size_t n = 0;

	while (strncmp(at, "```", 3) != 0) {
		const char *byte = at + 6; /* behind "0000  " */

		for (int i = 0; i < 16 && isxdigit((unsigned char)byte[0]); i++, byte += 3) {
			assert_true(n < capacity);
			ret_bytes[n++] = (uint8_t)strtoul(byte, NULL, 16);
		}
		at = strchr(at, '\n') + 1;
	}
	return n;
}

static void goldens_of_the_page_decode_and_encode(void **state)
{
	char *page = read_page();
	size_t n_seen = 0;

	(void)state;
	for (const char *at = page; (at = strstr(at, "```golden ")) != NULL;) {
		struct proto_buffer again = {0};
		struct fmha_error err = {0};
		uint8_t bytes[4096];
		char kind[32], name[32];
		size_t n;

		assert_int_equal(sscanf(at, "```golden %31s %31s", kind, name), 2);
		at = strchr(at, '\n') + 1;
		n = read_dump(at, bytes, sizeof(bytes));
		if (golden_receive(bytes, n, proto_method_find(name, strlen(name)), &again, &err) !=
		    0)
			fail_msg("%s %s: %s", kind, name, err.msg);
		assert_int_equal(again.size, n);
		assert_memory_equal(again.data, bytes, n);
		proto_buffer_deinit(&again);
		n_seen++;
	}
	assert_true(n_seen >= 10);
	free(page);
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(the_page_is_up_to_date),
		cmocka_unit_test(goldens_of_the_page_decode_and_encode),
	};

	if (argc > 1 && strcmp(argv[1], "--update") == 0) {
		update_page();
		return 0;
	}
	return cmocka_run_group_tests(tests, NULL, NULL);
}
