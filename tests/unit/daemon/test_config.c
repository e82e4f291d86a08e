/* SPDX-License-Identifier: MIT */
/* The configuration: what is accepted, and that a mistake is named by its path. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <base/config.h>
#include <base/log.h>

static int parse(const char *text, struct config *config, struct fmha_error *err)
{
	config_init(config);
	return config_parse("test.json", text, strlen(text), config, err);
}

static void defaults_are_the_documented_ones(void **state)
{
	struct config config;
	struct fmha_error err;

	(void)state;
	assert_int_equal(parse("{}", &config, &err), 0);
	assert_int_equal(config.limits[LIMIT_CONNECTIONS], 1024);
	assert_int_equal(config.limits[LIMIT_CONNECTIONS_PER_UID], 64);
	assert_int_equal(config.limits[LIMIT_FRAME_BYTES], 65536);
	assert_int_equal(config.limits[LIMIT_FDS_PER_MESSAGE], 4);
	assert_int_equal(config.limits[LIMIT_IN_FLIGHT_PER_UID], 256);
	assert_int_equal(config.limits[LIMIT_OUTPUT_HARD_BYTES], 4 << 20);
	assert_int_equal(config.socket_mode, CONFIG_MODE_UNSET);
}

/* What precedes "; default" of a key's entry in the manual: "\\fBtuning.idle_s\\fR (number, ...". */
static size_t read_default(const char *entry, char name[96], char value[256])
{
	const char *end = strchr(entry, '\n'), *found = strstr(entry, "; default ");
	size_t n;

	assert_int_equal(sscanf(entry, "\\fB%95[^\\]", name), 1);
	if (!found || found > end)
		return 0;
	found += strlen("; default ");
	n = strcspn(found, ";)\n");
	(void)snprintf(value, 256, "%.*s", (int)n, found);
	return n;
}

/* A configuration that says the defaults which the manual gives is one that says nothing. */
static void the_manuals_defaults_are_the_real_ones(void **state)
{
	struct config nothing, plain, said;
	struct fmha_error err;
	char *manual = NULL, *entry;
	size_t size, n_said = 0;
	FILE *out = open_memstream(&manual, &size);
	bool saw_automatic = false;

	(void)state;
	assert_non_null(out);
	config_document(out);
	assert_int_equal(fclose(out), 0);
	assert_int_equal(parse("{}", &nothing, &err), 0);
	assert_int_equal(parse("{\"devices\": [{}]}", &plain, &err), 0);
	for (entry = strstr(manual, "\\fB"); entry; entry = strstr(entry + 1, "\n\\fB")) {
		char name[96], value[256], text[512], *inner;
		bool quoted;

		entry += *entry == '\n';
		if (!read_default(entry, name, value))
			continue;
		quoted = value[0] >= 'a' && value[0] <= 'z' && strcmp(value, "true") != 0 &&
			 strcmp(value, "false") != 0;
		inner = strchr(name, '.');
		if (strncmp(name, "devices[].", 10) == 0)
			(void)snprintf(text, sizeof(text), "{\"devices\": [{\"%s\": %s}]}",
				       name + 10, value);
		else if (inner)
			(void)snprintf(text, sizeof(text), "{\"%.*s\": {\"%s\": %s}}",
				       (int)(inner - name), name, inner + 1, value);
		else
			(void)snprintf(text, sizeof(text), "{\"%s\": %s%s%s}", name,
				       quoted ? "\"" : "", value, quoted ? "\"" : "");
		if (parse(text, &said, &err) < 0)
			fail_msg("%s: %s", text, err.msg);
		if (strncmp(name, "devices[].", 10) == 0)
			assert_memory_equal(&said.devices[0], &plain.devices[0],
					    sizeof(plain.devices[0]));
		else if (memcmp(&said, &nothing, sizeof(said)) != 0)
			fail_msg("%s is not the default", text);
		saw_automatic |= strcmp(text, "{\"tuning\": {\"automatic\": true}}") == 0;
		n_said++;
	}
	assert_true(saw_automatic);
	assert_in_range(n_said, 30, 1000);
	free(manual);
}

static void every_key_is_read(void **state)
{
	static const char text[] =
		"{\"socket\": \"/tmp/s\", \"socket_mode\": \"0600\", \"socket_group\": \"fmha\","
		" \"log_level\": \"debug\", \"admin_uids\": [7, 8],"
		" \"priorities\": [{\"uid\": 1000, \"weight\": 4}, {\"weight\": 100, \"uid\": 0}],"
		" \"supervision\": {\"heartbeat_ms\": 20, \"drain_ms\": 0},"
		" \"limits\": {\"connections\": 3, \"memory_bytes\": 1099511627776},"
		" \"devices\": [{\"backend\": \"cpu\", \"threads\": 2, \"cpu_level\": "
		"\"portable\"},"
		" {\"backend\": \"fake\", \"allow_faults\": true, \"name\": \"f\", \"stall_ms\": "
		"60}]}";
	struct config config;
	struct fmha_error err;

	(void)state;
	assert_int_equal(parse(text, &config, &err), 0);
	assert_string_equal(config.socket, "/tmp/s");
	assert_int_equal(config.socket_mode, 0600);
	assert_string_equal(config.socket_group, "fmha");
	assert_int_equal(config.log_level, LOG_LEVEL_DEBUG);
	assert_int_equal(config.n_admins, 2);
	assert_int_equal(config.admin_uids[1], 8);
	assert_int_equal(config_weight(&config, 1000), 4);
	assert_int_equal(config_weight(&config, 0), 100);
	assert_int_equal(config_weight(&config, 7), 1);
	assert_int_equal(config.supervision.heartbeat_ms, 20);
	assert_int_equal(config.supervision.drain_ms, 0);
	assert_int_equal(config.limits[LIMIT_CONNECTIONS], 3);
	assert_int_equal(config.limits[LIMIT_MEMORY_BYTES], 1ull << 40);
	assert_int_equal(config.n_devices, 2);
	assert_string_equal(config.devices[0].cpu_level, "portable");
	assert_int_equal(config.devices[0].threads, 2);
	assert_string_equal(config.devices[1].backend, "fake");
	assert_true(config.devices[1].allow_faults);
	assert_int_equal(config.devices[1].stall_ms, 60);
}

static void mistakes_are_named_by_their_path(void **state)
{
	static const struct {
		const char *text, *field;
	} cases[] = {
		{"{\"sokcet\": \"x\"}", "sokcet"},
		{"{\"priorities\": {\"uid\": 1}}", "priorities"},
		{"{\"priorities\": [3]}", "priorities[0]"},
		{"{\"priorities\": [{\"uid\": 1}]}", "priorities[0]"},
		{"{\"priorities\": [{\"weight\": 1}]}", "priorities[0]"},
		{"{\"priorities\": [{\"uid\": 1, \"weight\": 0}]}", "priorities[0].weight"},
		{"{\"priorities\": [{\"uid\": 1, \"weight\": 101}]}", "priorities[0].weight"},
		{"{\"priorities\": [{\"uid\": 4294967295, \"weight\": 1}]}", "priorities[0].uid"},
		{"{\"priorities\": [{\"uid\": 1, \"weight\": 2}, {\"uid\": 1, \"weight\": 2}]}",
		 "priorities[1]"},
		{"{\"priorities\": [{\"uid\": 1, \"weight\": 2, \"gid\": 3}]}",
		 "priorities[0].gid"},
		{"{\"limits\": {\"descriptors\": 3}}", "limits.descriptors"},
		{"{\"limits\": {\"connections\": \"3\"}}", "limits.connections"},
		{"{\"limits\": {\"connections\": 1e300}}", "limits.connections"},
		{"{\"limits\": {\"connections\": 1e400}}", "limits.connections"},
		{"{\"limits\": {\"connections\": -1}}", "limits.connections"},
		{"{\"limits\": {\"hello_ms\": 5, \"hello_ms\": 6}}", "limits.hello_ms"},
		{"{\"limits\": 5}", "limits"},
		{"{\"devices\": [{}, {\"speed\": 1}]}", "devices[1].speed"},
		{"{\"devices\": [{}, {\"threads\": 99999}]}", "devices[1].threads"},
		{"{\"devices\": [3]}", "devices[0]"},
		{"{\"admin_uids\": [1, -1]}", "admin_uids"},
		{"{\"admin_uids\": 1}", "admin_uids"},
		{"{\"Socket\": \"x\"}", "Socket"}, /* keys are case-sensitive */
	};

	(void)state;
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		struct config config;
		struct fmha_error err = {0};

		assert_int_equal(parse(cases[i].text, &config, &err), FMHA_EINVAL);
		assert_string_equal(err.field, cases[i].field);
		assert_non_null(strstr(err.msg, "test.json"));
	}
}

static void what_is_no_json_is_refused_with_its_place(void **state)
{
	static const char *const texts[] = {"",     " ",        "{",   "}",   "{} x",
					    "{}{}", "{\"a\":}", "nul", "\xff"};
	struct config config;
	struct fmha_error err;

	(void)state;
	for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++)
		assert_int_equal(parse(texts[i], &config, &err), FMHA_EINVAL);
	assert_int_equal(parse("{\n  \"socket\": ,\n}", &config, &err), FMHA_EINVAL);
	assert_non_null(strstr(err.msg, "test.json:2:"));
	assert_int_equal(parse("{}\n", &config, &err), 0);
}

static void text_without_end_is_not_read_over(void **state)
{
	static const char text[] = "{\"socket\": \"/tmp/socket\"}";

	(void)state;
	/* Every prefix, in a block of exactly its size: the sanitizer sees a byte too many. */
	for (size_t n = 0; n < sizeof(text) - 1; n++) {
		struct config config;
		struct fmha_error err;
		char *copy = malloc(n ? n : 1);

		memcpy(copy, text, n);
		config_init(&config);
		assert_int_equal(config_parse("t", copy, n, &config, &err), FMHA_EINVAL);
		free(copy);
	}
}

static void contradictions_are_found(void **state)
{
	struct config config;
	struct fmha_error err;

	(void)state;
	assert_int_equal(parse("{\"limits\": {\"output_hard_bytes\": 65536}}", &config, &err), 0);
	assert_int_equal(config_resolve(&config, &err), FMHA_EINVAL);
	assert_string_equal(err.field, "limits.output_soft_bytes");
	assert_int_equal(parse("{}", &config, &err), 0);
	assert_int_equal(config_resolve(&config, &err), 0);
	assert_true(config.socket[0] == '/');
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(defaults_are_the_documented_ones),
		cmocka_unit_test(the_manuals_defaults_are_the_real_ones),
		cmocka_unit_test(every_key_is_read),
		cmocka_unit_test(mistakes_are_named_by_their_path),
		cmocka_unit_test(what_is_no_json_is_refused_with_its_place),
		cmocka_unit_test(text_without_end_is_not_read_over),
		cmocka_unit_test(contradictions_are_found),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
