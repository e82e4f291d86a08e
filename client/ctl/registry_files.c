/* SPDX-License-Identifier: MIT */
#include "registry_files.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cjson/cJSON.h>

#include "ctl.h"
#include "json.h"

/* An export, or NULL: a line says why. */
static cJSON *read_export(const char *path)
{
	cJSON *root = ctl_read_json(path);

	if (!root || (!strcmp(ctl_text(root, "format"), "fmhad-registry") &&
		      cJSON_IsArray(ctl_member(root, "kernels"))))
		return root;
	(void)fprintf(stderr, "fmhactl: %s: not a registry's export\n", path);
	cJSON_Delete(root);
	return NULL;
}

/* What both have to share. */
static bool registry_files_fits(const cJSON *a, const cJSON *b)
{
	static const char *const keys[] = {"device", "environment"};

	for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
		if (!strcmp(ctl_text(a, keys[i]), ctl_text(b, keys[i])))
			continue;
		(void)fprintf(stderr, "fmhactl: the second file is of another %s: '%s', not '%s'\n",
			      keys[i], ctl_text(b, keys[i]), ctl_text(a, keys[i]));
		return false;
	}
	return true;
}

/* ---- kernels and their results, by name ---- */

struct kernels {
	cJSON **list; /* sorted by name; items of the document */
	size_t n;
};

static int compare_names(const void *a, const void *b)
{
	return strcmp(ctl_text(*(cJSON *const *)a, "name"), ctl_text(*(cJSON *const *)b, "name"));
}

static bool kernels_init(struct kernels *kernels, const cJSON *root)
{
	cJSON *list = ctl_member(root, "kernels"), *item;

	*kernels = (struct kernels){
		.list = calloc((size_t)cJSON_GetArraySize(list) + 1, sizeof(cJSON *))};
	if (!kernels->list)
		return false;
	cJSON_ArrayForEach(item, list) kernels->list[kernels->n++] = item;
	qsort(kernels->list, kernels->n, sizeof(cJSON *), compare_names);
	return true;
}

static cJSON *find_kernel(const struct kernels *kernels, cJSON *like)
{
	cJSON **found = bsearch(&like, kernels->list, kernels->n, sizeof(cJSON *), compare_names);

	return found ? *found : NULL;
}

static cJSON *find_result(const cJSON *kernel, const cJSON *like)
{
	cJSON *result;

	cJSON_ArrayForEach(result, ctl_member(kernel, "tuned"))
	{
		if (!strcmp(ctl_text(result, "shape"), ctl_text(like, "shape")) &&
		    ctl_number(result, "splits") == ctl_number(like, "splits"))
			return result;
	}
	return NULL;
}

/* ---- merging ---- */

static void merge_results(cJSON *into, const cJSON *from, size_t *n_taken)
{
	cJSON *tuned = ctl_member(into, "tuned");
	const cJSON *result;

	if (!tuned && cJSON_GetArraySize(ctl_member(from, "tuned")) > 0)
		tuned = cJSON_AddArrayToObject(into, "tuned");
	cJSON_ArrayForEach(result, ctl_member(from, "tuned"))
	{
		cJSON *own = find_result(into, result);

		if (own && ctl_number(result, "when") <= ctl_number(own, "when"))
			continue;
		if (own)
			cJSON_Delete(cJSON_DetachItemViaPointer(tuned, own));
		cJSON_AddItemToArray(tuned, cJSON_Duplicate(result, true));
		++*n_taken;
	}
}

/* @into: NULL: the first document does not have the kernel. */
static void merge_kernel(cJSON *list, cJSON *into, const cJSON *from, size_t *n_taken)
{
	const cJSON *priority = ctl_member(from, "priority");

	if (!priority && cJSON_GetArraySize(ctl_member(from, "tuned")) == 0)
		return;
	if (!into) {
		into = cJSON_CreateObject();
		cJSON_AddStringToObject(into, "name", ctl_text(from, "name"));
		cJSON_AddItemToArray(list, into);
	}
	if (priority && !ctl_member(into, "priority"))
		cJSON_AddItemToObject(into, "priority", cJSON_Duplicate(priority, true));
	merge_results(into, from, n_taken);
}

static void merge_sets(cJSON *into, const cJSON *from)
{
	const cJSON *set;

	cJSON_ArrayForEach(set, from)
	{
		const cJSON *own = ctl_member(into, set->string);

		if (!own)
			cJSON_AddItemToObject(into, set->string, cJSON_Duplicate(set, true));
		else if (!cJSON_Compare(own, set, true))
			(void)fprintf(stderr, "fmhactl: set '%s' differs: the first file's stays\n",
				      set->string);
	}
}

int registry_write_file(const char *out, const char *text)
{
	FILE *file = out ? fopen(out, "we") : stdout;
	bool written = file && fputs(text, file) >= 0 && fputc('\n', file) != EOF;

	if (out && file && fclose(file) != 0)
		written = false;
	return written ? CTL_OK : ctl_file_error(out ? out : "stdout");
}

static int merge(cJSON *a, const cJSON *b, const char *out)
{
	struct kernels own = {0};
	cJSON *list = ctl_member(a, "kernels"), *kernel;
	size_t n_taken = 0;
	char *text;
	int r;

	if (!registry_files_fits(a, b))
		return CTL_FAILED;
	if (!kernels_init(&own, a))
		return ctl_usage_error("out of memory");
	cJSON_ArrayForEach(kernel, ctl_member(b, "kernels"))
		merge_kernel(list, find_kernel(&own, kernel), kernel, &n_taken);
	free(own.list);
	merge_sets(ctl_member(a, "sets"), ctl_member(b, "sets"));
	cJSON_DeleteItemFromObjectCaseSensitive(a, "statistics"); /* of the first file alone */
	text = cJSON_Print(a);
	r = text ? registry_write_file(out, text) : ctl_usage_error("out of memory");
	cJSON_free(text);
	if (r == 0)
		(void)fprintf(stderr, "%zu results of the second file taken\n", n_taken);
	return r;
}

/* ---- comparing ---- */

/* 0: there is none. */
static void say(size_t *n, const char *kernel, const char *what, double a, double b)
{
	if (++*n == 1)
		(void)puts("the first file's -> the second file's; -: it has none");
	(void)printf("%s\n  %s: ", kernel, what);
	if (a == 0)
		(void)printf("- -> %.6g\n", b);
	else if (b == 0)
		(void)printf("%.6g -> -\n", a);
	else
		(void)printf("%.6g -> %.6g\n", a, b);
}

/* "b2h16..., 3 splits". */
static const char *result_title(const cJSON *result, char *title, size_t n)
{
	if (ctl_number(result, "splits") > 1)
		(void)snprintf(title, n, "%s, %.0f splits", ctl_text(result, "shape"),
			       ctl_number(result, "splits"));
	else
		(void)snprintf(title, n, "%s", ctl_text(result, "shape"));
	return title;
}

static void compare_kernel(const cJSON *a, const cJSON *b, size_t *n)
{
	const char *name = ctl_text(a ? a : b, "name");
	const cJSON *result;
	char title[256];

	if (ctl_number(a, "priority") != ctl_number(b, "priority"))
		say(n, name, "priority", ctl_number(a, "priority"), ctl_number(b, "priority"));
	cJSON_ArrayForEach(result, ctl_member(a, "tuned"))
	{
		const cJSON *other = find_result(b, result);

		if (ctl_number(other, "us") != ctl_number(result, "us"))
			say(n, name, result_title(result, title, sizeof(title)),
			    ctl_number(result, "us"), ctl_number(other, "us"));
	}
	cJSON_ArrayForEach(result, ctl_member(b, "tuned"))
	{
		if (!find_result(a, result))
			say(n, name, result_title(result, title, sizeof(title)), 0,
			    ctl_number(result, "us"));
	}
}

static void compare_sets(const cJSON *a, const cJSON *b, size_t *n)
{
	const cJSON *set;

	cJSON_ArrayForEach(set, a)
	{
		if (!cJSON_Compare(set, ctl_member(b, set->string), true)) {
			(void)printf("set %s differs\n", set->string);
			++*n;
		}
	}
	cJSON_ArrayForEach(set, b)
	{
		if (!ctl_member(a, set->string)) {
			(void)printf("set %s: only the second has it\n", set->string);
			++*n;
		}
	}
}

static int registry_files_compare(const cJSON *a, const cJSON *b)
{
	struct kernels first, second;
	size_t n = !registry_files_fits(a, b);
	bool ready = kernels_init(&first, a);

	ready = kernels_init(&second, b) && ready;
	for (size_t i = 0; ready && i < first.n; i++)
		compare_kernel(first.list[i], find_kernel(&second, first.list[i]), &n);
	for (size_t i = 0; ready && i < second.n; i++)
		if (!find_kernel(&first, second.list[i]))
			compare_kernel(NULL, second.list[i], &n);
	free(first.list);
	free(second.list);
	if (!ready)
		return ctl_usage_error("out of memory");
	compare_sets(ctl_member(a, "sets"), ctl_member(b, "sets"), &n);
	if (n == 0)
		(void)puts("both remember the same");
	return n == 0 ? CTL_OK : CTL_FAILED;
}

static int with_both(const char *first, const char *second, const char *out, bool merges)
{
	cJSON *a = read_export(first), *b = a ? read_export(second) : NULL;
	int r = CTL_IO;

	if (a && b)
		r = merges ? merge(a, b, out) : registry_files_compare(a, b);
	cJSON_Delete(a);
	cJSON_Delete(b);
	return r;
}

int registry_merge_files(const char *first, const char *second, const char *out)
{
	return with_both(first, second, out, true);
}

int registry_compare_files(const char *first, const char *second, const char *out)
{
	(void)out;
	return with_both(first, second, NULL, false);
}
