// SPDX-License-Identifier: MIT
/* Broken files: each is a copy of the real folder with one text replaced, and the message must have
 * the file, the path in the document and the reason. */
#include <ftw.h>
#include <sys/stat.h>
#include <unistd.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <specs/space.h>

static char folder[] = "/tmp/fmha-specs-XXXXXX";

static int remove_entry(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
	(void)st, (void)type, (void)ftw;
	return remove(path);
}

static int make_folder(void **state)
{
	static const char *const parts[] = {"arch", "rules", "sweeps"};
	char path[128];

	(void)state;
	if (!mkdtemp(folder))
		return -1;
	for (int i = 0; i < 3; i++) {
		(void)snprintf(path, sizeof(path), "%s/%s", folder, parts[i]);
		if (mkdir(path, 0700) < 0)
			return -1;
	}
	return 0;
}

static int remove_folder(void **state)
{
	(void)state;
	return nftw(folder, remove_entry, 8, FTW_DEPTH | FTW_PHYS);
}

/* Copies a file of the source tree, with the first @from as @to; @from NULL: as it is. */
static void copy_file(const char *name, const char *from, const char *to)
{
	static char text[1 << 20];
	char path[256];
	FILE *file;
	size_t n;
	char *at;

	(void)snprintf(path, sizeof(path), "%s/%s", SPECS_SOURCE_DIR, name);
	file = fopen(path, "r");
	assert_non_null(file);
	n = fread(text, 1, sizeof(text) - 1, file);
	(void)fclose(file);
	text[n] = '\0';
	(void)snprintf(path, sizeof(path), "%s/%s", folder, name);
	file = fopen(path, "w");
	assert_non_null(file);
	at = from ? strstr(text, from) : text + n;
	if (!at)
		fail_msg("%s: there is no %s", name, from);
	(void)fwrite(text, 1, (size_t)(at - text), file);
	if (from) {
		(void)fputs(to, file);
		(void)fputs(at + strlen(from), file);
	}
	assert_int_equal(fclose(file), 0);
}

static void copy_all(void)
{
	copy_file("words.json", NULL, NULL);
	copy_file("profiles.json", NULL, NULL);
	copy_file("rules/ck.json", NULL, NULL);
	copy_file("arch/gfx942.json", NULL, NULL);
	copy_file("sweeps/bwd.json", NULL, NULL);
}

struct broken {
	const char *file, *from, *to, *path, *reason;
};

static const struct broken broken_files[] = {
	{"words.json", "\"qs\",", "\"qs\"", "line", "not JSON"},
	{"words.json", "\"qs\",", "\"qr\",", "/pipelines/2", "'qr' appears twice"},
	{"words.json", "\"qs\",", "\"q-s\",", "/pipelines/2", "words are made of"},
	{"words.json", "\"qs\",", "7,", "/pipelines/2", "must be a string"},
	{"words.json", "\"tile_tags\": [\"\", ", "\"tile_tags\": [", "/tile_tags", "empty word"},
	{"words.json", "\"tile_tags\"", "\"tile_tag\"", "/tile_tag", "unknown key"},
	{"words.json", "\"fp32\": {\"bytes\": 4,", "\"fp32\": {", "/data_types/fp32/bytes",
	 "is missing"},
	{"words.json", "\"fp32\": {\"bytes\": 4,", "\"fp32\": {\"bytes\": 4.5,",
	 "/data_types/fp32/bytes", "whole number"},
	{"words.json", "\"fp32\"", "\"fp31\"", "/data_types/fp31", "no such data type"},
	{"profiles.json", "\"flash_fwd\"", "\"ck_default\"", "/profiles/2/name", "appears twice"},
	{"profiles.json", "\"keep\": \"data_type != 'fp32'\"", "\"keep\": \"data_type != 'fp31'\"",
	 "/profiles/0/keep", "data_type is never 'fp31'"},
	{"profiles.json", "\"receipt\": 2,", "\"receipt\": \"2\",", "/profiles/2/receipt",
	 "must be a number"},
	{"profiles.json", "\"receipt\": 2,", "\"receipt\": 2, \"receipt\": 3,",
	 "/profiles/2/receipt", "the key appears twice"},
	{"arch/gfx942.json", "\"arch\": \"gfx942\"", "\"arch\": \"gfx943\"", "/arch",
	 "not the name of the file"},
	{"arch/gfx942.json", "\"rules\": \"ck\"", "\"rules\": \"kc\"", "/spaces/0/rules",
	 "no rules/kc.json"},
	{"arch/gfx942.json", "\"lds_banks\": 32, ", "", "/spaces/0/constants/lds_banks",
	 "is missing"},
	{"arch/gfx942.json", "\"lds_banks\": 32, ", "\"lds_banks\": 32, \"lds_bunks\": 1, ",
	 "/spaces/0/constants/lds_bunks", "no such constant"},
	{"arch/gfx942.json", "[80, 96]", "[80, 96, 1]", "/spaces/0/head_dims/fp16/2",
	 "must have 2 numbers"},
	{"arch/gfx942.json", "[80, 96]", "[80, -96]", "/spaces/0/head_dims/fp16/2/1", "from 1 to"},
	{"arch/gfx942.json", "\"data_types\": [\"fp16\"", "\"data_types\": [\"fp17\"",
	 "/spaces/0/data_types/0", "'fp17' is not a data_type"},
	{"arch/gfx942.json", "\"qr_pagedkv\"", "\"qr_pagedvk\"", "/spaces/0/pipelines/3",
	 "is not a pipeline"},
	{"rules/ck.json", "\"rules\": [\"cap_excludes_bias\"", "\"rules\": [\"cap_excludes\"",
	 "/variants/fwd/0/rules/0", "no field 'cap_excludes'"},
	{"rules/ck.json", "not (logits and bias", "not (logits and and bias",
	 "/variants/fwd/0/rules/0", "definition of cap_excludes_bias, column 17"},
	{"rules/ck.json", "arch.async_lds_bytes and", "arch.lds_byte and",
	 "definition of async_fits", "no constant 'lds_byte'"},
	{"rules/ck.json", "\"receipt\": \"forward\"", "\"receipt\": \"fwd\"",
	 "/variants/fwd/0/receipt", "no table of receipts 'fwd'"},
	{"rules/ck.json", "\"tiles\": \"forward\"", "\"tiles\": \"fwd\"", "/variants/fwd/0/tiles",
	 "no tiles 'fwd'"},
	{"rules/ck.json", "\"for\": [\"modes\"", "\"for\": [\"mods\"", "/variants/fwd/0/for/0",
	 "no set of axes 'mods'"},
	{"rules/ck.json", "{\"pads\": [\"ffff\"", "{\"pads\": [\"fff\"", "/pads/0",
	 "four of f, t and 8"},
	{"rules/ck.json", "{\"pads\": [\"ffff\"", "{\"padz\": [\"ffff\"", "/padz",
	 "there is no field"},
	{"rules/ck.json", "\"mask\": [\"no\", \"top_left\"", "\"mask\": [\"no\", \"topleft\"",
	 "/axes/caps_and_masks/mask/1", "'topleft' is not a mask"},
	{"rules/ck.json", "{\"mode\": [\"batch\"", "{\"mode,mode\": [[\"batch\"", "line",
	 "not JSON"},
	{"rules/ck.json", "\"field\": \"data_type\", \"require\": \"data_type in arch.data_types\"",
	 "\"field\": \"dtype\", \"require\": \"data_type in arch.data_types\"", "/validate/0/field",
	 "there is no field 'dtype'"},
	{"rules/ck.json", "\"level\": \"warning\"", "\"level\": \"wrong\"", "/level",
	 "must be error or warning"},
	{"rules/ck.json", "\"group_needs_padding\": \"mode != 'group' or",
	 "\"group_needs_padding\": \"group_needs_padding or", "", "go in a circle"},
};

static void broken_files_are_explained(void **state)
{
	(void)state;
	for (size_t i = 0; i < sizeof(broken_files) / sizeof(broken_files[0]); i++) {
		const struct broken *b = &broken_files[i];
		struct spec_catalog *broken = NULL;
		struct fmha_error err = {0};
		int r;

		copy_all();
		copy_file(b->file, b->from, b->to);
		r = spec_catalog_load(folder, NULL, &broken, &err);
		if (r == 0) {
			/* Tile generators are compiled when a space is made. */
			struct spec_space_options options = {.arch = "gfx942", .config_json = "{}"};
			struct spec_space *space = NULL;

			r = spec_space_new(broken, &options, &space, &err);
			spec_space_free(space);
			spec_catalog_free(broken);
		}
		if (r != FMHA_EINVAL)
			fail_msg("%s with %s: accepted", b->file, b->to);
		if (!strstr(err.msg, b->file) || !strstr(err.msg, b->path) ||
		    !strstr(err.msg, b->reason))
			fail_msg("%s with %s: %s", b->file, b->to, err.msg);
	}
}

static void a_good_copy_loads(void **state)
{
	struct spec_catalog *copy;
	struct fmha_error err = {0};

	(void)state;
	copy_all();
	if (spec_catalog_load(folder, NULL, &copy, &err) < 0)
		fail_msg("%s", err.msg);
	assert_int_equal(spec_arch_count(copy), 1);
	spec_catalog_free(copy);
	/* $FMHA_SPECS_DIR says where, too. */
	assert_int_equal(setenv("FMHA_SPECS_DIR", folder, 1), 0);
	assert_int_equal(spec_catalog_load(NULL, NULL, &copy, &err), 0);
	assert_int_equal(spec_arch_count(copy), 1);
	assert_int_equal(spec_arch_find(copy, "gfx950"), -1);
	spec_catalog_free(copy);
	assert_int_equal(setenv("FMHA_SPECS_DIR", "/nonexistent", 1), 0);
	assert_int_equal(spec_catalog_load(NULL, NULL, &copy, &err), FMHA_EIO);
	assert_non_null(strstr(err.msg, "/nonexistent"));
	assert_int_equal(unsetenv("FMHA_SPECS_DIR"), 0);
}

static void a_new_arch_is_a_new_file(void **state)
{
	struct spec_space_options options = SPEC_SPACE_OPTIONS("gfx943");
	struct spec_catalog *more;
	struct spec_space *space;
	struct fmha_error err = {0};
	char from[128], to[128];

	(void)state;
	copy_all();
	copy_file("arch/gfx942.json", "\"arch\": \"gfx942\"", "\"arch\": \"gfx943\"");
	(void)snprintf(from, sizeof(from), "%s/arch/gfx942.json", folder);
	(void)snprintf(to, sizeof(to), "%s/arch/gfx943.json", folder);
	assert_int_equal(rename(from, to), 0);
	copy_file("sweeps/bwd.json", NULL, NULL);
	if (spec_catalog_load(folder, NULL, &more, &err) < 0)
		fail_msg("%s", err.msg);
	options.config = "bwd";
	assert_int_equal(spec_space_new(more, &options, &space, &err), 0);
	assert_int_equal(spec_space_count(space), 12192);
	spec_space_free(space);
	spec_catalog_free(more);
	assert_int_equal(unlink(to), 0);
}

static void broken_sweeps_are_explained(void **state)
{
	static const char *const sweeps[][2] = {
		{"{", "not JSON"},
		{"[]", "config: /: must be an object"},
		{"{\"variant\": 3}", "config: /variant: must be a string"},
		{"{\"trait_confg\": {}}", "config: /trait_confg: unknown key"},
		{"{\"trait_config\": {\"msk\": {\"values\": []}}}",
		 "/trait_config/msk: unknown key"},
		{"{\"trait_config\": {\"mask\": [\"no\"]}}",
		 "/trait_config/mask: must be an object"},
		{"{\"trait_config\": {\"mask\": {\"values\": \"no\"}}}",
		 "/mask/values: must be a list"},
		{"{\"trait_config\": {\"mask\": {\"values\": [\"casual\"]}}}",
		 "/mask/values/0: 'casual' is not a mask"},
		{"{\"trait_config\": {\"lse\": {\"values\": [2]}}}",
		 "/lse/values/0: 2 is no value of lse"},
		{"{\"trait_config\": {\"block_per_cu\": [1.5]}}",
		 "/block_per_cu/0: 1.5: must be a whole"},
		{"{\"trait_config\": {\"mask\": {\"value\": []}}}", "/mask/value: unknown key"},
		{"{} {}", "not JSON"},
	};
	struct fmha_error err = {0};
	struct spec_catalog *good;

	(void)state;
	copy_all();
	assert_int_equal(spec_catalog_load(folder, NULL, &good, &err), 0);
	for (size_t i = 0; i < sizeof(sweeps) / sizeof(sweeps[0]); i++) {
		struct spec_space_options options = {.arch = "gfx942", .config_json = sweeps[i][0]};
		struct spec_space *space;

		assert_int_equal(spec_space_new(good, &options, &space, &err), FMHA_EINVAL);
		if (!strstr(err.msg, sweeps[i][1]))
			fail_msg("%s: %s", sweeps[i][0], err.msg);
	}
	spec_catalog_free(good);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_good_copy_loads),
		cmocka_unit_test(broken_files_are_explained),
		cmocka_unit_test(a_new_arch_is_a_new_file),
		cmocka_unit_test(broken_sweeps_are_explained),
	};

	return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
