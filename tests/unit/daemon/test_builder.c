/* SPDX-License-Identifier: MIT */
/* The front's side of compiling: what it takes from a worker, whom it charges, what it forgets. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "builder.h"

struct fixture {
	char root[64];
	uv_loop_t loop;
	struct config_compile config;
	struct limits limits;
	struct accounts accounts;
	struct builder *builder;
	struct builder_asker asker;
	uint32_t n_asked, n_answers;
	int code; /* of the last answer */
};

/* The helper: tells a version, or does what @body says with "$5", where the code goes. */
static void write_helper(struct fixture *f, const char *body)
{
	FILE *file = fopen(f->config.helper, "w");

	assert_non_null(file);
	(void)fprintf(file, "#!/bin/sh\n[ \"$1\" = --version ] && echo nvrtc 0 && exit\n%s\n",
		      body);
	(void)fclose(file);
	assert_int_equal(chmod(f->config.helper, 0700), 0);
}

/* sha256sum's, of the text "code". */
static const uint8_t sha256_of_code[] = {0x56, 0x94, 0xd0, 0x8a, 0x2e, 0x53, 0xff, 0xca,
					 0xe0, 0xc3, 0x10, 0x3e, 0x5a, 0xd6, 0xf6, 0x07,
					 0x6a, 0xbd, 0x96, 0x0e, 0xb1, 0xf8, 0xa5, 0x65,
					 0x77, 0x04, 0x0b, 0xc1, 0x02, 0x8f, 0x70, 0x2b};

static void on_done(void *owner, uint32_t id, const struct proto_compile_result *result, int fd,
		    const struct fmha_error *error)
{
	struct fixture *f = owner;

	assert_in_range(id, 1, f->n_asked);
	f->n_answers++;
	f->code = error->code;
	assert_true((fd >= 0) == (error->code == 0));
	if (fd < 0)
		return;
	assert_int_equal(result->size, 4);
	assert_int_equal(result->hash_bytes, sizeof(sha256_of_code));
	assert_memory_equal(result->hash, sha256_of_code, sizeof(sha256_of_code));
	(void)close(fd);
}

static int setup(void **state)
{
	struct fixture *f = calloc(1, sizeof(*f));

	strcpy(f->root, "/tmp/fmhad-builder-test-XXXXXX");
	if (!mkdtemp(f->root))
		return -1;
	(void)snprintf(f->config.helper, sizeof(f->config.helper), "%s/helper", f->root);
	(void)snprintf(f->config.cache, sizeof(f->config.cache), "%s/cache", f->root);
	(void)snprintf(f->config.sources, sizeof(f->config.sources), "%s", f->root);
	f->config.jobs = 1;
	f->asker = (struct builder_asker){.done = on_done, .owner = f};
	list_init(&f->asker.requests);
	f->limits.value[LIMIT_COMPILES] = 3;
	f->limits.value[LIMIT_COMPILES_PER_UID] = 2;
	accounts_init(&f->accounts, &f->limits);
	(void)uv_loop_init(&f->loop);
	write_helper(f, "sleep 0.3; printf code >\"$5\"");
	if (builder_new(&f->loop, &f->config, &f->accounts, &f->builder, NULL) != 0)
		return -1;
	*state = f;
	return 0;
}

static int teardown(void **state)
{
	struct fixture *f = *state;
	char command[96];

	f->builder = builder_free(f->builder);
	(void)uv_run(&f->loop, UV_RUN_DEFAULT);
	assert_int_equal(uv_loop_close(&f->loop), 0);
	assert_true(list_is_empty(&f->accounts.list)); /* nobody is charged for anything */
	(void)snprintf(command, sizeof(command), "rm -rf '%s'", f->root);
	if (system(command) != 0)
		return -1;
	free(f);
	return 0;
}

/* Asks for a kernel with one option. Its id is the number of those that were asked for. */
static int submit(struct fixture *f, uint32_t uid, const char *option, struct fmha_error *err)
{
	struct proto_compile_params params = {
		.uid = uid,
		.build = {
			.name = "kernel", .arch = "sm_90a", .source = "fmha.hip", .n_options = 1}};

	(void)snprintf(params.build.options[0], BUILD_WORD_BYTES, "%s", option);
	return builder_submit(f->builder, &f->asker, ++f->n_asked, &params, err);
}

static void wait_for(struct fixture *f, uint32_t n)
{
	while (f->n_answers < n)
		(void)uv_run(&f->loop, UV_RUN_ONCE);
}

static void every_request_is_charged_to_its_user(void **state)
{
	struct fixture *f = *state;
	struct fmha_error err = {0};

	assert_int_equal(submit(f, 1, "-DA=1", &err), 0);
	assert_int_equal(submit(f, 1, "-DA=2", &err), 0);
	assert_int_equal(submit(f, 1, "-DA=3", &err), FMHA_EQUOTA);
	assert_int_equal(submit(f, 2, "-DA=3", &err), 0);
	assert_int_equal(submit(f, 2, "-DA=4", &err), FMHA_EQUOTA); /* of all */
	assert_int_equal(f->limits.hits[LIMIT_COMPILES_PER_UID], 1);
	assert_int_equal(f->limits.hits[LIMIT_COMPILES], 1);
	wait_for(f, 3);
	assert_int_equal(f->code, 0);
	assert_int_equal(f->accounts.used[ACCOUNT_COMPILES], 0);
}

static void what_is_forgotten_is_not_answered_and_not_charged(void **state)
{
	struct fixture *f = *state;

	assert_int_equal(submit(f, 1, "-DA=1", NULL), 0);
	assert_int_equal(submit(f, 1, "-DA=2", NULL), 0);
	assert_true(builder_forget(&f->asker, 1));
	assert_false(builder_forget(&f->asker, 1));
	assert_int_equal(f->accounts.used[ACCOUNT_COMPILES], 1);
	wait_for(f, 1);
	assert_int_equal(f->n_answers, 1);
	/* One that has ended and is not delivered yet. */
	assert_int_equal(submit(f, 1, "-DA=2", NULL), 0);
	(void)usleep(300000);
	assert_true(builder_forget(&f->asker, 3));
	(void)uv_run(&f->loop, UV_RUN_NOWAIT);
	assert_int_equal(f->n_answers, 1);
	assert_int_equal(f->accounts.used[ACCOUNT_COMPILES], 0);
	assert_int_equal(submit(f, 1, "-DA=3", NULL), 0); /* left for teardown */
}

static void nothing_but_macros_reaches_a_compiler(void **state)
{
	static const char *const bad[] = {"-fplugin=/tmp/x.so", "/etc/passwd", "@file",
					  "-DA=1 -o /tmp/x"};
	struct fixture *f = *state;
	struct proto_compile_params params = {.build = {.name = "kernel", .arch = "sm_90a"}};
	struct fmha_error err = {0};

	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
		assert_int_equal(submit(f, 1, bad[i], &err), FMHA_EINVAL);
		assert_string_equal(err.field, "options");
	}
	(void)strcpy(params.build.source, "../fmha.hip");
	assert_int_equal(builder_submit(f->builder, &f->asker, 1, &params, &err), FMHA_EINVAL);
	assert_string_equal(err.field, "source");
	assert_int_equal(f->accounts.used[ACCOUNT_COMPILES], 0);
}

int main(void)
{
#define BUILDER_TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
	const struct CMUnitTest tests[] = {
		BUILDER_TEST(every_request_is_charged_to_its_user),
		BUILDER_TEST(what_is_forgotten_is_not_answered_and_not_charged),
		BUILDER_TEST(nothing_but_macros_reaches_a_compiler),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
