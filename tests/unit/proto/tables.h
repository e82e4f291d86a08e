/* SPDX-License-Identifier: MIT */
/*
 * tables.h: every table of fields that is on the wire, once: what the methods' parameters and results
 * hold, each before what it holds, and the error. Found by walking from the methods, so that none can be
 * forgotten here.
 */
#ifndef TESTS_UNIT_PROTO_TABLES_H
#define TESTS_UNIT_PROTO_TABLES_H

#include <stddef.h>
#include <stdlib.h>

#include <proto/messages.h>

#include "field.h"

#define TABLES_MAX 128

struct tables {
	const struct field_table *at[TABLES_MAX];
	size_t n;
};

static inline void tables_add(struct tables *tables, const struct field_table *table)
{
	if (table->n_fields == 0)
		return;
	for (size_t i = 0; i < tables->n; i++) {
		if (tables->at[i] == table)
			return;
	}
	if (tables->n == TABLES_MAX)
		abort();
	tables->at[tables->n++] = table;
	for (uint32_t i = 0; i < table->n_fields; i++) {
		if (table->fields[i].table)
			tables_add(tables, table->fields[i].table);
	}
}

static inline struct tables tables_all(void)
{
	struct tables tables = {.n = 0};

	for (int method = 0; method < PROTO_N_METHODS; method++) {
		tables_add(&tables, proto_params_tables[method]);
		tables_add(&tables, proto_result_tables[method]);
	}
	tables_add(&tables, &proto_error_table);
	return tables;
}

#endif
