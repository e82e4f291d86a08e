/* SPDX-License-Identifier: MIT */
/* metrics.c: the daemon's counters for a monitoring system. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cjson/cJSON.h>
#include <metrics/metrics.h>

#include "ctl.h"
#include "json.h"

struct request {
	struct ctl_target target;
	const char *out; /* NULL: stdout */
};

static const struct cli_option own_options[] = {{"out", 'o', "FILE",
						 "write there, all at once, instead of to stdout",
						 CLI_TO(TEXT, struct request, out)},
						CLI_END};

static void print_text(FILE *out, const void *text)
{
	(void)fputs(text, out);
}

/* a="b",c="d" as an object. Values of ours have no escapes. */
static cJSON *labels_of(char *text)
{
	cJSON *labels = cJSON_CreateObject();
	char *state = NULL;

	for (char *label = strtok_r(text, ",", &state); label;
	     label = strtok_r(NULL, ",", &state)) {
		char *value = strchr(label, '=');

		if (!value || value[1] != '"')
			continue;
		*value = value[strlen(value) - 1] = '\0';
		cJSON_AddStringToObject(labels, label, value + 2);
	}
	return labels;
}

/* Samples of the text, each with its name, labels and value; the text is used up. */
static char *as_json(char *text)
{
	cJSON *list = cJSON_CreateArray();
	char *state = NULL, *printed;

	for (char *line = strtok_r(text, "\n", &state); line; line = strtok_r(NULL, "\n", &state)) {
		char *value = strrchr(line, ' '), *labels = strchr(line, '{'), none[] = "";
		cJSON *sample;

		if (*line == '#' || !value)
			continue;
		*value++ = '\0';
		if (labels) {
			*labels++ = '\0';
			labels[strlen(labels) - 1] = '\0';
		}
		sample = ctl_add_item(list);
		cJSON_AddStringToObject(sample, "name", line);
		cJSON_AddItemToObject(sample, "labels", labels_of(labels ? labels : none));
		cJSON_AddNumberToObject(sample, "value", strtod(value, NULL));
	}
	printed = cJSON_Print(list);
	cJSON_Delete(list);
	return printed;
}

static int print_metrics(const char *json, const char *out, bool is_json)
{
	cJSON *status = cJSON_Parse(json);
	char *text = status ? metrics_text(status, METRICS_CLASSIC) : NULL, *classic = text;
	int r = CTL_REFUSED;

	cJSON_Delete(status);
	if (text && is_json) {
		text = as_json(classic);
		free(classic);
	}
	if (!text)
		(void)fputs("fmhactl: the daemon's status is no JSON\n", stderr);
	else if (out)
		r = ctl_replace_file(out, print_text, text);
	else
		r = fputs(text, stdout) >= 0 && (!is_json || putchar('\n') >= 0) ? CTL_OK : CTL_IO;
	free(text);
	return r;
}

static int metrics(int argc, char **argv)
{
	struct request request = {.target = CTL_TARGET_INIT};
	char *json;
	int r = ctl_options(&ctl_metrics, argc, argv, &request.target, NULL, &request);

	if (r == 0)
		r = ctl_ask_status(&request.target, &json);
	if (r != 0)
		return r;
	r = print_metrics(json, request.out, request.target.json);
	free(json);
	return r;
}

const struct ctl_command ctl_metrics = {
	.usage = {.name = "fmhactl metrics",
		  .brief = "counters and latencies for Prometheus",
		  .synopsis = "[--out FILE] [OPTION...]",
		  .text = "Prints what the daemon has counted in Prometheus' text format, for a "
			  "collector of text files such as node_exporter's. It has sums only: no "
			  "user, process or shape is named. With metrics_socket in fmhad.json(5) "
			  "the daemon answers the same over HTTP, as OpenMetrics for those who "
			  "accept that.",
		  .tables = {own_options, ctl_json_option, ctl_target_options}},
	.run = metrics,
};
